// The weights are Sphinx's own; a changelog mentions everything, and so comes last. A var, because Sphinx declares one, too.
var Scorer = {
  score: ([docname, , , , score]) => (docname === "reference/changelog" ? score - 200 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
