"""How Sphinx builds the site: ``./scripts/docs``."""

import html
import io
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, is_typeddict

from docutils import nodes
from docutils.io import NullOutput
from numpy.typing import ArrayLike
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.text import TextBuilder
from sphinx.domains.python._object import PyObject
from sphinx.util import logging
from sphinx.util.nodes import make_refnode
from sphinx.util.typing import stringify_annotation
from sphinx.writers.text import TextWriter

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINE = 100  # characters of a signature
LONG = 30  # of a cell that is a sentence, or of code that may be broken
PROJECT = tomllib.loads((ROOT / "sub-packages" / "headrace" / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]
PACKAGES = ("headrace.size_aware_batching", "headrace.weighted_sampler", "headrace.webdatamodule")
PUBLIC = {name: f"{package}.{name}" for package in PACKAGES for name in import_module(package).__all__}
COMMANDS = {
    "headrace-shards": "headrace.webdatamodule.cli",
    "headrace-batches": "headrace.size_aware_batching.cli",
    "headrace-mixtures": "headrace.weighted_sampler.cli",
    "headrace-runs": "headrace.runs.cli",
}
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")
_FOUND_BY = re.compile(r"^<!-- found by: (.*?)\s*-->$", re.MULTILINE | re.DOTALL)
_HELP = re.compile(r"^```\{command-help\} (.*)\n```$", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ARRAY = re.compile(r"(~?)(?:numpy\.)?ndarray\[tuple\[(?:~?typing\.)?Any, \.\.\.\], (?:~?numpy\.)?dtype\[(.*?)\]\]")
_WEIGHT = re.compile(r"int \| float \| \S*Fraction \| \S*Decimal \| \S*integer\[\S*Any\] \| \S*floating\[\S*Any\]")
_PLAIN = {
    "~headrace.webdatamodule.loading.stage_report.Reports": "dict[~{Split}, ~{LoaderReport}]".format_map(PUBLIC),
    "SampleKeys": "Sequence[str]",
    "~headrace.webdatamodule.loading.factories.Batches": "~collections.abc.Iterable[~collections.abc.Sequence[int]]",
    "~headrace.webdatamodule.loading.factories.Indices": "~collections.abc.Iterable[int]",
    "Mapping[str, Weight | tuple[Weight, NamedWeights]]": "NamedWeights",
}
_BY_SPLIT = re.compile(r"(~?[\w.]*Mapping)\[(~?[\w.]*Split), (.+?)\] \| \1\[str, \3\] \| \1\[\2 \| str, \3\]")
_BY_NAME = re.compile(r"~?[\w.]*ByName\[(.+?)\] \| \1 \| ")
MEMBERS = 4  # more have a table
MANY = 10  # arguments: more are listed by subject
_SUBJECTS = {
    "Data": "dataset datasets shards source sources sizes sizeof decode transform collate_fn keys allowed_classes "
    "verify max_bytes on_error suffix_keys_wds dirs_tars_wds prefix_tars_wds samples directory columns",
    "Budget and batches": "max_total_size tokens_per_step accumulate budget strategy cost max_items batch_size "
    "batch_sampler global_batch_size batch_size_multiple length_multiple shapes work drop_last "
    "by label_per extra_per_sample",
    "Mixture": "weights weight_dict semantics epoch_length temperature schedule per stopping max_passes mix",
    "Order": "sampler shuffle seed seed_per curriculum window block balanced_ranks plan_cache buffer_size",
    "Ranks": "num_replicas rank mesh tail check_ranks",
    "Long samples": "max_length oversize",
    "Workers": "num_workers prefetch_factor pin_memory timeout multiprocessing_context",
    "Resume": "accept exact fixed_epoch fingerprint",
    "Other": "",
}
_SUBJECT = {name: subject for subject, names in _SUBJECTS.items() for name in names.split()}
_TABS = re.compile(r"^<!-- (tabs|end of tabs) -->$", re.MULTILINE)
_logger = logging.getLogger(__name__)

project = "headrace"
author = "the authors of headrace"
release = version = PROJECT["version"]
html_title = f"headrace {release}"
html_logo = html_favicon = "_static/mark.svg"
html_baseurl = os.environ.get("SITE_URL", "")  # absolute, with a slash at its end; pictures of social previews need it
html_search_scorer = str(DOCS / "search_scorer.js")
html_theme = "furo"
html_show_copyright = False
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = True  # llms.txt names the Markdown of the pages
html_sourcelink_suffix = ""
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["custom.css"]
html_js_files = [("tabs.js", {"defer": "defer"})]
html_theme_options = {
    "source_repository": SOURCE,
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [{"name": "Source", "url": SOURCE, "html": "Source", "class": "source"}],
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
exclude_patterns = ["_build"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
copybutton_exclude = ".linenos, .gp, .go"  # prompts and what a program printed
default_role = "code"  # `name` in a docstring
highlight_language = "python"
myst_heading_anchors = 4  # page.md#heading is checked
myst_enable_extensions = ["colon_fence"]

napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autoclass_content = "class"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["grain"]  # the pages of its adapter need only the names
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__, extra_repr"}
autodoc_typehints_format = "short"
maximum_signature_line_length = 1  # so that Sphinx writes commas; short_signatures() joins short ones
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
smartquotes_action = "De"  # dashes; "skip" in a docstring is what people type
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!headrace\.).*")]  # types of others: a build needs no network


def insert_help(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 -- Sphinx names them
    """Fill in what a command says of itself where a page has a block ``{command-help} headrace-shards pack``."""

    def said(match: re.Match[str]) -> str:
        command, *words = match[1].split()
        os.environ["COLUMNS"] = "88"
        with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):
            import_module(COMMANDS[command]).main([*words, "--help"])
        return f"```text\n{_COLOURS.sub('', text.getvalue())}```"

    source[0] = _HELP.sub(said, source[0])


def insert_index(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 -- Sphinx names them
    """Index a page or section by the words in ``<!-- found by: oom; ... -->``, so that a search begins with it."""

    def indexed(match: re.Match[str]) -> str:
        words = (" ".join(word.split()) for word in match[1].split(";"))
        return "```{index} " + ", ".join(f"! {word}" for word in words) + "\n```"

    source[0] = _FOUND_BY.sub(indexed, source[0])


def insert_tabs(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 -- Sphinx names them
    """Mark the sections between ``<!-- tabs -->`` and ``<!-- end of tabs -->``: tabs.js shows one of them at a time."""
    source[0] = _TABS.sub(lambda match: f'<div class="{match[1].replace(" ", "-")}"></div>', source[0])


def link_outside(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links that lead out of docs/ into links to the repository, and warn of what is not there."""
    folder = (Path(app.srcdir) / docname).parent

    def linked(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if path.is_relative_to(DOCS):
            return match[0]
        if not path.is_relative_to(ROOT) or not path.exists():
            _logger.warning("there is no %s", match[1], location=docname)
        elif match[2] and path.suffix == ".md" and match[2][1:] not in set(anchors(path.read_text())):
            _logger.warning("there is no %s in %s", match[2], match[1], location=docname)
        kind = "tree" if path.is_dir() else "blob"
        return f"]({SOURCE}/{kind}/main/{path.relative_to(ROOT).as_posix()}{match[2] or ''})"

    source[0] = _OUTSIDE.sub(linked, source[0])


def anchors(markdown: str) -> Iterator[str]:
    """Yield the names under which GitHub links to the headings of a text."""
    for heading in re.findall(r"^#+ +(.*)$", markdown, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def plain_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001 -- Sphinx names them
    """Keep napoleon from reading "What it is: in words." as a type and a description."""
    if what == "property":
        lines[:0] = ["..", ""]  # an empty comment
    for number, line in enumerate(lines[:-1]):
        if line.strip() == "Returns:":
            text = lines[number + 1].lstrip()
            lines[number + 1] = f"{lines[number + 1].removesuffix(text)}: {text}"  # an empty type


def short(text: str) -> str:
    """Write types as people write them: aliases by their names, and classes that are only containers as such."""
    text = text.replace(stringify_annotation(ArrayLike, "smart"), "ArrayLike").replace("<factory>", "...")
    text = _BY_SPLIT.sub(r"\1[\2 | str, \3]", _ARRAY.sub(r"\1NDArray[\2]", _WEIGHT.sub("Weight", text)))
    text = _BY_NAME.sub(r"\1 | ", text)
    for long, plain in _PLAIN.items():
        text = text.replace(long, plain)
    return text


def short_arguments(*event: Any) -> tuple[str | None, str | None]:
    """Shorten the types of a signature; leave it out where nobody calls the class."""
    what, _, obj, _, signature, returned = event[1:]
    if what == "class" and (is_typeddict(obj) or issubclass(obj, Enum) or getattr(obj, "_is_protocol", False)):
        return "", None
    if what == "exception" and signature and "__init__" not in vars(obj):
        return "", None  # that of the base
    return signature and short(signature), returned and short(returned)


def short_signatures(app: Sphinx, doctree: nodes.document, docname: str) -> None:  # noqa: ARG001 -- Sphinx names them
    """Shorten the types of properties, too, and give a long signature a line for each argument."""
    for signature in doctree.findall(addnodes.desc_signature):
        for parameters in signature.findall(addnodes.desc_parameterlist):
            typed = any(part.astext() == ":" for part in parameters.findall(addnodes.desc_sig_punctuation))
            parameters["multi_line_parameter_list"] = typed and len(signature.astext()) > LINE
        for annotation in signature.findall(addnodes.desc_annotation):
            if (plain := short(annotation.astext())) != annotation.astext():
                annotation[:] = [nodes.Text(plain)]


def api_layout(app: Sphinx, doctree: nodes.document, docname: str) -> None:  # noqa: ARG001 -- Sphinx names them
    """Begin with what a class is, an example and its members; then come the details, and arguments by subject."""
    for described in doctree.findall(addnodes.desc):
        signature, content = described[0], described[-1]
        by_subject(signature, content)
        members = [node for node in content if isinstance(node, addnodes.desc) and node[0]["ids"]]
        if len(members) > MEMBERS:
            texts = [node for node in content if not isinstance(node, addnodes.desc | addnodes.index)]
            fields = [number for number, node in enumerate(texts) if isinstance(node, nodes.field_list)]
            last = fields[-1] + 1 if fields else len(texts)
            rest = [node for node in content if isinstance(node, addnodes.desc | addnodes.index)]
            content[:] = [*texts[:1], *texts[last:], members_table(members), *texts[1:last], *rest]


def by_subject(signature: nodes.Element, content: nodes.Element) -> None:
    """List many arguments by subject, with their types, so that the signature holds only names and defaults."""
    fields = [field for part in content if isinstance(part, nodes.field_list) for field in part]
    lists = [field[1][0] for field in fields if field[0].astext() == "Parameters"]
    if not lists or not isinstance(lists[0], nodes.bullet_list) or len(lists[0]) < MANY:
        return
    types = {}
    for parameter in signature.findall(addnodes.desc_parameter):
        if len(parameter) > 3 and parameter[1].astext() == ":":
            equals = [isinstance(node, addnodes.desc_sig_operator) and node.astext() == "=" for node in parameter]
            end = equals.index(True) - 1 if any(equals) else len(parameter)
            types[parameter[0].astext()] = parameter[3:end]
            parameter[1:] = parameter[end + 1 : end + 2] + parameter[end + 3 :] if any(equals) else []
    subjects: dict[str, nodes.bullet_list] = {subject: nodes.bullet_list() for subject in _SUBJECTS}
    for item in lists[0]:
        name = item[0][0].astext()
        item[0][1:1] = [nodes.Text(" ("), *types[name], nodes.Text(")")] if name in types else []
        subjects[_SUBJECT.get(name, "Other")].append(item)
    used = {subject: items for subject, items in subjects.items() if len(items)}
    titled = [(nodes.paragraph("", subject, classes=["subject"]), items) for subject, items in used.items()]
    lists[0].parent[:] = [lists[0]] if len(titled) < 3 else [node for pair in titled for node in pair]


def members_table(members: list[Any]) -> nodes.container:
    """Return the names of members, linked, and the first sentences of their texts."""
    body = nodes.tbody()
    for member in members:
        name = "".join(part.astext() for part in member[0].findall(addnodes.desc_name))
        called = name if member["objtype"] in ("property", "attribute") else f"{name}()"
        link = nodes.reference("", "", nodes.literal("", called), internal=True, refid=member[0]["ids"][0])
        cells = [nodes.paragraph("", "", link), nodes.paragraph("", first_sentence(member[-1]))]
        body.append(nodes.row("", *(nodes.entry("", cell) for cell in cells)))
    group = nodes.tgroup("", *(nodes.colspec(colwidth=50) for _ in range(2)), body, cols=2)
    return nodes.container("", nodes.table("", group, classes=["members"]), classes=["table-wrapper"])


def left_out(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:  # noqa: ARG001 -- Sphinx names them
    """Leave out what a trainer calls, and the fields of named tuples, which have no text of their own."""
    alias = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return True if alias or name.startswith("on_") else None


def find_public(app: Sphinx, env: Any, node: Any, content: nodes.TextElement) -> nodes.Node | None:
    """Resolve a type hint, which names the module where a class lives, to the public name that is documented."""
    target = str(node.get("reftarget", ""))
    public = PUBLIC.get(target.rpartition(".")[2])
    if public == target or not target.startswith("headrace."):
        return None
    if not public:
        return content  # of no use to a reader, such as a protocol of any DeviceMesh
    domain = env.domains.python_domain
    found: nodes.Node | None = domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, content)
    return found


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Link the first mention of a public name in each section or description to its text."""
    objects = app.env.domains.python_domain.objects
    kinds = ("class", "data", "exception", "function")
    documented = {name.rpartition(".")[2]: name for name, found in objects.items() if found.objtype in kinds}
    linked = set()
    for literal in [*doctree.findall(nodes.literal)]:
        above = [*iter_above(literal)]
        name = documented.get(literal.astext().removesuffix("()"), "")
        within = next((node for node in above if isinstance(node, nodes.section | addnodes.desc)), None)
        own = {id_ for node in above if isinstance(node, addnodes.desc) for id_ in node[0]["ids"]}
        fixed = any(isinstance(node, nodes.reference | nodes.title) for node in above)
        if name and name not in own and not fixed and (id(within), name) not in linked:
            linked.add((id(within), name))
            found = objects[name]
            literal.replace_self(
                make_refnode(app.builder, docname, found.docname, found.node_id, literal.deepcopy(), name)
            )


def classes(app: Sphinx, doctree: nodes.document, docname: str) -> None:  # noqa: ARG001 -- Sphinx names them
    """Mark cells that are sentences, and code that is short enough to stay on a line."""
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) > LONG:
            cell["classes"].append("text")
    for literal in doctree.findall(nodes.literal):
        if len(literal.astext()) < LONG:
            literal["classes"].append("short")


def iter_above(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the nodes that hold one, from the innermost."""
    while node := node.parent:
        yield node


def all_documented(app: Sphinx, env: Any) -> None:  # noqa: ARG001 -- Sphinx names them
    """Warn of public names that no page documents."""
    for name in sorted(set(PUBLIC.values()) - set(env.domains.python_domain.objects)):
        _logger.warning("%s is public, but no page documents it", name)


def titles_of_their_own(app: Sphinx, env: Any) -> None:  # noqa: ARG001 -- Sphinx names them
    """Warn of pages that the contents name otherwise than the page itself."""
    for docname in env.found_docs:
        for toctree in env.get_doctree(docname).findall(addnodes.toctree):
            for title, page in toctree["entries"]:
                if title:
                    _logger.warning(
                        "%s is %r in the contents: use the title of the page", page, title, location=docname
                    )


def describe(*event: Any) -> None:
    """Say in the head of a page what it is about, for search engines and previews of links."""
    app, pagename, _, context, doctree = event
    if doctree is None:
        return
    title = f"{app.env.titles[pagename].astext()} - headrace" if pagename != "index" else "headrace"
    tags = {
        "og:type": "website",
        "og:site_name": "headrace",
        "og:title": title,
        "og:description": first_sentence(doctree),
    }
    if app.config.html_baseurl:
        tags["og:url"] = context["pageurl"]
        tags["og:image"] = f"{app.config.html_baseurl}_images/quickstart.png"
    lines = [f'<meta property="{name}" content="{html.escape(text)}">' for name, text in tags.items()]
    lines += [f'<meta name="description" content="{html.escape(tags["og:description"])}">']
    lines += ['<meta name="twitter:card" content="summary_large_image">']
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def first_sentence(tree: nodes.Element) -> str:
    """Return how the text of a page or of a description begins."""
    paragraph = next(tree.findall(nodes.paragraph), nodes.paragraph()).astext().replace("\n", " ")
    return re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)[0].rstrip(":")


def group_pages(*event: Any) -> None:
    """Put the captions of a page's tables of contents above its groups in the sidebar."""
    app, pagename, _, context, _ = event
    for docname in app.env.toctree_includes:
        for toctree in app.env.get_doctree(docname).findall(addnodes.toctree):
            if toctree["caption"] and docname != "index":
                first = app.builder.get_relative_uri(pagename, toctree["entries"][0][1]) or "#"
                entry = rf'<li class="[^"]*"><a class="[^"]*" href="{re.escape(first)}">'
                caption = rf'<li class="group">{html.escape(toctree["caption"])}</li>\g<0>'
                context["furo_navigation_tree"] = re.sub(entry, caption, context["furo_navigation_tree"], count=1)


def write_llms(app: Sphinx, exception: Exception | None) -> None:
    """Write llms.txt, every page with its first sentence in the order of the site, and llms-full.txt with all text."""
    if exception is not None or app.builder.name != "html":
        return
    lines, texts = [], []
    printer = TextBuilder(app, app.env)  # of pages made from docstrings or scripts, there is no Markdown to give
    printer.init()
    for docname in in_order(app.env, "index"):
        tree = app.env.get_doctree(docname)
        title, first = app.env.titles[docname].astext(), first_sentence(tree)
        made = docname.startswith("reference/") or docname == "how-to/scripts"
        page = f"{docname}.html" if made else f"_sources/{docname}.md"
        if made:
            writer = TextWriter(printer)
            writer.write(app.env.get_and_resolve_doctree(docname, printer), NullOutput())
            text = writer.output
        else:
            text = Path(app.srcdir, f"{docname}.md").read_text()
        texts.append(f"<!-- {docname} -->\n\n{text.strip()}\n")
        if docname == "index":
            lines += [
                f"# {title}",
                "",
                f"> {first}",
                "",
                "All pages in one file: [llms-full.txt](llms-full.txt)",
                "",
                "## Pages",
                "",
            ]
        else:
            lines.append(f"- [{title}]({page}): {first}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")
    Path(app.outdir, "llms-full.txt").write_text("\n".join(texts))


def in_order(env: Any, docname: str) -> Iterator[str]:
    """Yield a page and those below it as the table of contents has them."""
    yield docname
    for below in env.toctree_includes.get(docname, ()):
        yield from in_order(env, below)


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    for field in PyObject.doc_field_types:
        field.label = "Attributes" if field.name == "variable" else field.label
    app.connect("source-read", insert_help)
    app.connect("source-read", insert_index)
    app.connect("source-read", insert_tabs)
    app.connect("source-read", link_outside)
    app.connect("autodoc-process-docstring", plain_colons, priority=400)
    app.connect("autodoc-process-signature", short_arguments)
    app.connect("autodoc-skip-member", left_out)
    app.connect("missing-reference", find_public)
    app.connect("doctree-resolved", api_layout)
    app.connect("doctree-resolved", short_signatures)
    app.connect("doctree-resolved", link_names)
    app.connect("doctree-resolved", classes)
    app.connect("env-check-consistency", all_documented)
    app.connect("env-check-consistency", titles_of_their_own)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", group_pages, priority=900)  # after the theme has made the tree
    app.connect("build-finished", write_llms)
