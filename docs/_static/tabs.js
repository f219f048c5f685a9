// Sections between two marks become tabs; a page without JavaScript, and the Markdown, show them one below the other.
// A choice holds on other pages, too: "Lightning" here is "Lightning" there.
function tabs(begin) {
  const end = [...document.querySelectorAll(".end-of-tabs")].find(
    (mark) => begin.compareDocumentPosition(mark) & Node.DOCUMENT_POSITION_FOLLOWING,
  );
  const sections = [];
  let section = begin.nextElementSibling ?? begin.parentElement.nextElementSibling;
  for (; section?.tagName === "SECTION"; section = section.nextElementSibling) {
    sections.push(section);
    if (section.contains(end)) break;
  }
  const heading = (tab) => tab.querySelector("h2, h3, h4");
  const title = (tab) => heading(tab).firstChild.textContent;
  const bar = document.createElement("div");
  bar.className = "tab-bar";
  bar.setAttribute("role", "tablist");
  const show = (shown) => {
    sections.forEach((tab, number) => {
      tab.classList.toggle("hidden-tab", tab !== shown);
      bar.children[number].setAttribute("aria-selected", tab === shown);
    });
  };
  for (const tab of sections) {
    const button = document.createElement("button");
    button.textContent = title(tab);
    button.setAttribute("role", "tab");
    button.addEventListener("click", () => {
      show(tab);
      localStorage.setItem("tab", title(tab));
    });
    bar.append(button);
  }
  sections[0].before(bar);
  const linked = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const tab = target && sections.find((each) => each.contains(target));
    if (tab) {
      show(tab);
      target.scrollIntoView();
    }
    return tab;
  };
  addEventListener("hashchange", linked);
  show(sections.find((tab) => title(tab) === localStorage.getItem("tab")) ?? sections[0]);
  linked();
}

document.querySelectorAll(".tabs").forEach(tabs);
