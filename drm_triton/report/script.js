"use strict";
// Show one user at a time, and search users by id or item. Without this script all users are visible.
for (const browser of document.querySelectorAll(".browser")) {
  const links = [...browser.querySelectorAll(".index a")];
  const articles = new Map(links.map(link => [link, document.getElementById(link.hash.slice(1))]));
  const texts = new Map([...articles].map(([link, article]) => [link, article.textContent.toLowerCase()]));
  const field = browser.querySelector("input");
  const status = browser.querySelector(".status");
  const initialStatus = status.textContent;
  const visibleLinks = () => links.filter(link => !link.parentElement.hidden);

  const select = link => {
    for (const [other, article] of articles) {
      article.hidden = other !== link;
      if (other === link) other.setAttribute("aria-current", "true");
      else other.removeAttribute("aria-current");
    }
  };

  const search = () => {
    const text = field.value.trim().toLowerCase();
    for (const link of links) link.parentElement.hidden = !texts.get(link).includes(text);
    const matches = visibleLinks();
    status.textContent = text ? `${matches.length} of ${links.length} users` : initialStatus;
    if (matches.length && !matches.some(link => link.hasAttribute("aria-current"))) select(matches[0]);
  };

  const linkInAddress = () => links.find(link => link.hash === location.hash);

  for (const link of links) {
    link.addEventListener("click", event => {
      event.preventDefault(); // show the user without scrolling the page
      history.replaceState(null, "", link.hash);
      select(link);
    });
    link.addEventListener("keydown", event => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const next = step && visibleLinks()[visibleLinks().indexOf(link) + step];
      if (!next) return;
      event.preventDefault();
      next.focus();
      select(next);
    });
  }
  field.disabled = false;
  field.addEventListener("input", search);
  addEventListener("hashchange", () => linkInAddress() && select(linkInAddress()));
  if (links.length) select(linkInAddress() || links[0]);
  search();
}
