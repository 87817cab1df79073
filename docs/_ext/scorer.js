// Sphinx's scores, except that a heading with the words as they were typed comes first,
// and changes and measurements come last.
const WORDS_IN_HEADING = 10;
const ABOUT_SOMETHING_ELSE = -4;
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score, , kind]) =>
    score +
    (kind === "title" ? WORDS_IN_HEADING : 0) +
    (/^(changelog|migration|contributing|tables\/|notebooks\/|what_works)/.test(page)
      ? ABOUT_SOMETHING_ELSE
      : 0),
};
