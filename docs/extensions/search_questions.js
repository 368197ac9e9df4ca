// Searches a built site for the questions of users: node search_questions.js SITE QUESTIONS
//
// Every line of QUESTIONS is a question, a tab, and the pages of which one must be found first. Prints the others.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, questions] = process.argv.slice(2);
const location = { search: "" };
const element = { dataset: { content_root: "" } };
const document = { documentElement: element, getElementById: () => null, addEventListener: () => {}, readyState: "loading" };
const page = vm.createContext({ document, location, URLSearchParams, DOCUMENTATION_OPTIONS: {}, SPHINX_HIGHLIGHT_ENABLED: false });
page.window = page;
for (const name of ["doctools.js", "language_data.js", "searchtools.js"]) {
  vm.runInContext(fs.readFileSync(path.join(site, "_static", name), "utf8"), page);
}
vm.runInContext(fs.readFileSync(path.join(site, "searchindex.js"), "utf8"), page);

for (const line of fs.readFileSync(questions, "utf8").split("\n").filter(Boolean)) {
  const [question, expected] = line.split("\t");
  page.location.search = new URLSearchParams({ q: question }).toString();
  page.question = question;
  const found = vm.runInContext("Search._performSearch(...Search._parseQuery(question))", page);
  const first = found.at(-1)?.[0]; // the best result is the last one
  if (!expected.split(" ").includes(first)) console.log(`${question}: ${first}, not ${expected}`);
}
