// Search, colours, menu and enlarged pictures. Nothing is requested by fetch or a worker, which browsers refuse to pages of a folder.
const root = document.documentElement;
const element = (id) => document.getElementById(id);

element("colours").addEventListener("click", () => colours.write(root.dataset.theme === "dark" ? "light" : "dark"));

element("menu").addEventListener("click", ({ currentTarget }) => {
  currentTarget.setAttribute("aria-expanded", String(element("nav").classList.toggle("open")));
});
element("nav").querySelector('[aria-current="page"]')?.scrollIntoView({ block: "nearest" });
if (matchMedia("(max-width: 72rem)").matches) element("toc")?.removeAttribute("open");

// Search: a section is found if it has all words; words in its heading, and whole words, count for more.
const form = element("search"), input = form.elements.q, results = element("results");

function withIndex(then) {
  if (window.searchIndex) return then();
  const script = document.createElement("script");
  script.src = `${root.dataset.base}/search/index.js`;
  script.onload = then;
  document.head.append(script);
}

function score([address, page, heading, text], words) {
  let total = 0;
  for (const word of words) {
    const weights = [[heading, 30], [page, 10], [text, 1]];
    let points = 0;
    for (const [where, weight] of weights) {
      const parts = where.toLowerCase().split(word);
      const whole = parts.slice(1).some((after, n) => !/[\p{L}\p{N}]$/u.test(parts[n]) && !/^[\p{L}\p{N}]/u.test(after));
      points += weight * (Math.min(parts.length - 1, 5) + (whole ? 3 : 0));
    }
    if (!points) return 0;
    total += points;
  }
  return address.startsWith("CHANGELOG") ? total / 10 : total;    // long, and about what was
}

function excerpt(text, words) {
  const lower = text.toLowerCase(), first = Math.min(...words.map((word) => lower.indexOf(word)).filter((at) => at >= 0));
  const from = Number.isFinite(first) && first > 60 ? text.indexOf(" ", first - 60) + 1 : 0;
  const line = document.createElement("p");
  let rest = (from ? "… " : "") + text.slice(from, from + 220).replace(/\s\S*$/, "");
  while (rest) {
    const places = words.map((word) => [rest.toLowerCase().indexOf(word), word]).filter(([at]) => at >= 0);
    const [at, word] = places.sort(([a], [b]) => a - b)[0] || [rest.length, ""];
    const mark = document.createElement("mark");
    mark.textContent = rest.slice(at, at + word.length);
    line.append(rest.slice(0, at), ...(word ? [mark] : []));
    rest = rest.slice(at + word.length);
  }
  return line;
}

function show() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  results.hidden = !words.length;
  if (!words.length) return;
  const found = window.searchIndex.map((entry) => [score(entry, words), entry]).filter(([points]) => points);
  found.sort(([a], [b]) => b - a);
  results.replaceChildren(...found.slice(0, 20).map(([, [address, page, heading, text]]) => {
    const link = document.createElement("a"), title = document.createElement("strong");
    link.href = `${root.dataset.base}/${address}`;
    title.textContent = heading === page ? page : `${page}: ${heading}`;
    link.append(title, excerpt(text, words));
    return link;
  }));
  if (!found.length) results.textContent = "Nothing found: fewer or shorter words may help.";
}

input.addEventListener("input", () => withIndex(show));
input.addEventListener("focus", () => withIndex(show));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  results.querySelector("a")?.click();
});
document.addEventListener("click", ({ target }) => {
  if (!form.contains(target) || target.closest("#results a")) results.hidden = true;
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") results.hidden = true;
  if (event.key === "/" && !/input|textarea/i.test(document.activeElement.tagName)) {
    event.preventDefault();
    input.focus();
  }
});
const asked = new URLSearchParams(location.search).get("q");
if (asked) {
  input.value = asked;
  withIndex(show);
}

// A picture opens over the page; without this script its link opens the file.
for (const link of document.querySelectorAll("a.picture")) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const dialog = document.createElement("dialog"), image = new Image();
    image.src = link.href;
    image.alt = link.firstElementChild.alt;
    dialog.append(image);
    dialog.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  });
}

// A page from a server without TLS has no clipboard.
for (const block of navigator.clipboard ? document.querySelectorAll("div.highlight") : []) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.querySelector("pre").textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  block.append(button);
}
