// A wide table is scrolled by the keyboard, and the search has a name.
document$.subscribe(() => requestAnimationFrame(() => {
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((one) => { one.tabIndex = 0; });
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
}));
