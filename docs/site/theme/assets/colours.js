// Before anything is drawn: the colours that the reader has chosen, or else those of the system.
const colours = {
  read() {
    try { return localStorage.getItem("colours"); } catch { return null; }   // a browser may refuse storage to files
  },
  write(theme) {
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("colours", theme); } catch { /* the page alone keeps it */ }
  },
};
document.documentElement.dataset.theme = colours.read() || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
