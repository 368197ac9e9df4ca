// Ranks results of the site's search. By itself it knows the best word alone, and orders equal pages by title.

const EXAMPLES = /^(algorithms|api|benchmarks|changelog|compression-results|drawing|gallery|study|tutorials)/;

/** Return the stems of the words of a text. */
function stems(text) {
  const stemmer = new Stemmer();
  return text.toLowerCase().split(/[^\w.]+/).filter(Boolean).map((word) => stemmer.stemWord(word));
}

/** Return the number of words of the longest index entry of a page that the query contains. */
function entryWords(page, query) {
  const { docnames, indexentries } = Search._index;
  const lengths = Object.entries(indexentries)
    .filter(([, places]) => places.some(([file, , isMain]) => isMain && docnames[file] === page))
    .map(([entry]) => stems(entry))
    .filter((words) => words.every((word) => query.includes(word)))
    .map((words) => words.length);
  return Math.max(0, ...lengths);
}

var Scorer = {
  score: ([page, , , , score]) => {
    const query = stems(new URLSearchParams(location.search).get("q"));
    return score + 20 * entryWords(page, query) - (EXAMPLES.test(page) ? 4 : 0);
  },
  // as those of Sphinx
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
