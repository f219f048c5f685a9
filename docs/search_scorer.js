// The weights are Sphinx's own, but one. Tasks come first; records and the changelog mention everything, and so come last.
// A var, because Sphinx declares one, too.
var Scorer = {
  score: ([page, , , , score]) => {
    if (page === "reference/changelog") return score - 200;
    if (/^(benchmarks|peers|decisions)$/.test(page)) return score - 15;
    return /^(how-to|tutorial|install)/.test(page) ? score + 15 : score;
  },
  objNameMatch: 50, // the name of a class leads to its text
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
