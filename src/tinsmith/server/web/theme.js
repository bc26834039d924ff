// Not a module: it has to run before anything is painted, or a dark page would flash white.
document.documentElement.dataset.theme = localStorage.getItem("tinsmith.theme") ?? "auto";
