// The interaction of a pattern explorer: choice of a head, hover over a pattern or over tokens.
// `root` is its element, `data` has names[n], n, first[2], and layers[layer][head], bytes of n x n weights from 0 to 255.
(function (root, data) {
  "use strict";
  if (root.isExplorer) return; // of several copies in a notebook, each is filled once
  root.isExplorer = true;
  const n = data.n, cell = Math.max(4, Math.floor(448 / n));
  const byClass = (name) => root.querySelector("." + name);
  const canvas = byClass("pattern"), readout = byClass("readout"), tokens = byClass("tokens"), title = byClass("title");
  for (const filled of [tokens, byClass("heads")]) filled.replaceChildren(); // of a page that a browser saved
  let weights = null, query = null, key = null, pinned = false;

  function decode(text) { // a byte 0 is followed by a number of zeros
    const raw = atob(text), out = new Uint8Array(n * n);
    for (let k = 0, at = 0; k < raw.length; k++) {
      const w = raw.charCodeAt(k);
      if (w) out[at++] = w;
      else at += raw.charCodeAt(++k);
    }
    return out;
  }

  const shade = (w) => [255 - 247 * w, 255 - 207 * w, 255 - 148 * w]; // white is 0, dark blue 1

  function paint(target, values, size) {
    const image = new ImageData(n, n);
    for (let k = 0; k < n * n; k++) image.data.set([...shade(values[k] / 255), 255], 4 * k);
    target.width = target.height = n * size;
    const context = target.getContext("2d");
    context.putImageData(image, 0, 0);
    if (size === 1) return;
    context.imageSmoothingEnabled = false;
    context.drawImage(target, 0, 0, n, n, 0, 0, n * size, n * size);
  }

  const percent = (w) => (w === 0 ? "0" : w < 2 ? "<1" : String(Math.round((100 * w) / 255))) + " %";
  const named = (k) => data.names[k] + " (" + k + ")";
  const fromQuery = () => byClass("side").value === "query";

  function show() { // the pattern with the chosen row and column, the tokens in the shade of their weights
    paint(canvas, weights, cell);
    const context = canvas.getContext("2d");
    context.strokeStyle = "#d2601a";
    if (query !== null) context.strokeRect(0.5, query * cell + 0.5, n * cell - 1, cell - 1);
    if (key !== null) context.strokeRect(key * cell + 0.5, 0.5, cell - 1, n * cell - 1);
    const at = query !== null ? (j) => weights[query * n + j] : key !== null ? (i) => weights[i * n + key] : () => 0;
    [...tokens.children].forEach((token, k) => {
      const w = at(k) / 255;
      token.style.background = `rgb(${shade(w)})`;
      token.style.color = w > 0.5 ? "#fff" : "#222";
      token.classList.toggle("chosen", k === query || (query === null && k === key));
    });
    readout.textContent = sentence(at);
  }

  function sentence(at) {
    if (query === null && key === null) return "Point at the pattern or at a token; click to keep it.";
    if (query !== null && key !== null)
      return `${named(query)} attends to ${named(key)}: ${percent(weights[query * n + key])}`;
    const order = data.names.map((_, k) => k).sort((a, b) => at(b) - at(a) || a - b);
    const largest = order.slice(0, 5).filter((k) => at(k) > 0).map((k) => `${named(k)} ${percent(at(k))}`).join(", ");
    const verb = query !== null ? "attends to" : "is attended to by";
    return `${named(query !== null ? query : key)} ${verb} ${largest || "nothing"}`;
  }

  function point(i, j) {
    if (pinned) return;
    query = i;
    key = j;
    show();
  }

  function choose(layer, head, button) {
    weights = decode(data.layers[layer][head]);
    title.textContent = `Head ${layer}.${head}`;
    root.querySelectorAll(".heads button").forEach((other) => other.setAttribute("aria-pressed", other === button));
    show();
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const place = (x, length) => Math.min(n - 1, Math.max(0, Math.floor((n * x) / length)));
    return [place(event.clientY - box.top, box.height), place(event.clientX - box.left, box.width)];
  }

  function pin(i, j) {
    pinned = false;
    point(i, j);
    pinned = i !== null || j !== null;
  }

  canvas.addEventListener("mousemove", (event) => point(...cellAt(event)));
  canvas.addEventListener("mouseleave", () => point(null, null));
  canvas.addEventListener("click", (event) => (pinned ? pin(null, null) : pin(...cellAt(event))));
  byClass("side").addEventListener("change", () => {
    const at = query !== null ? query : key;
    if (at !== null) [query, key] = fromQuery() ? [at, null] : [null, at];
    show();
  });
  data.names.forEach((name, k) => {
    const token = document.createElement("button");
    token.type = "button";
    token.textContent = name;
    token.title = `position ${k}`;
    const both = () => (fromQuery() ? [k, null] : [null, k]);
    token.addEventListener("mouseenter", () => point(...both()));
    token.addEventListener("focus", () => point(...both()));
    token.addEventListener("mouseleave", () => point(null, null));
    token.addEventListener("click", () => (pinned ? pin(null, null) : pin(...both())));
    tokens.append(token);
  });
  data.layers.forEach((heads, layer) => {
    const row = document.createElement("div");
    row.append(`${layer}`);
    heads.forEach((text, head) => {
      const button = document.createElement("button"), small = document.createElement("canvas");
      button.type = "button";
      button.title = `head ${layer}.${head}`;
      button.setAttribute("aria-label", button.title);
      paint(small, decode(text), 1);
      button.append(small);
      button.addEventListener("click", () => choose(layer, head, button));
      row.append(button);
    });
    byClass("heads").append(row);
  });
  byClass("heads").children[data.first[0]].querySelectorAll("button")[data.first[1]].click();
})
