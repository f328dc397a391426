"use strict";
// Show one user at a time, and find users by id or by an item; without this script all stand below one another.
for (const browser of document.querySelectorAll(".browser")) {
  const links = [...browser.querySelectorAll(".index a")];
  const articles = new Map(links.map(link => [link, document.getElementById(link.hash.slice(1))]));
  const texts = new Map([...articles].map(([link, article]) => [link, article.textContent.toLowerCase()]));
  const field = browser.querySelector("input");
  const status = browser.querySelector(".status");
  const everyone = status.textContent;
  const listed = () => links.filter(link => !link.parentElement.hidden);

  const select = link => {
    for (const [other, article] of articles) {
      article.hidden = other !== link;
      if (other === link) other.setAttribute("aria-current", "true");
      else other.removeAttribute("aria-current");
    }
  };

  const find = () => {
    const wanted = field.value.trim().toLowerCase();
    for (const link of links) link.parentElement.hidden = !texts.get(link).includes(wanted);
    const left = listed();
    status.textContent = wanted ? `${left.length} of ${links.length} users` : everyone;
    if (left.length && !left.some(link => link.hasAttribute("aria-current"))) select(left[0]);
  };

  const follow = () => links.find(link => link.hash === location.hash);

  for (const link of links) {
    link.addEventListener("click", event => {
      event.preventDefault(); // the user is shown in place, and the page does not jump
      history.replaceState(null, "", link.hash);
      select(link);
    });
    link.addEventListener("keydown", event => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const next = step && listed()[listed().indexOf(link) + step];
      if (!next) return;
      event.preventDefault();
      next.focus();
      select(next);
    });
  }
  field.disabled = false;
  field.addEventListener("input", find);
  addEventListener("hashchange", () => follow() && select(follow()));
  if (links.length) select(follow() || links[0]);
  find();
}
