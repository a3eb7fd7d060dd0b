"use strict";

// Keeps a page of the studio up to date: parts that have changed on the server replace those that are shown.

const FOCUSABLE = "a, button, input, select, summary, [tabindex]";

function parts(page) {
  return [page.querySelector("header"), ...page.querySelector("main").children];
}

// What a person did to a part stays: folded tables, marked runs, choices, where it was scrolled to, what has the focus.
function keep(old, fresh) {
  const pairs = (selector) => {
    const found = fresh.querySelectorAll(selector);
    return [...old.querySelectorAll(selector)].map((one, index) => [one, found[index]]).filter(([, other]) => other);
  };
  for (const [one, other] of pairs("details")) other.open = one.open;
  for (const [one, other] of pairs("select, input:not([type=checkbox])")) other.value = one.value;
  const marked = new Set([...old.querySelectorAll("input:checked")].map((box) => box.value));
  for (const box of fresh.querySelectorAll("input")) box.checked = marked.has(box.value);
  const focused = pairs(FOCUSABLE).find(([one]) => one === document.activeElement);
  const scrolled = pairs(".box, dd").map(([one, other]) => [other, one.scrollLeft, one.scrollTop]);
  old.replaceWith(fresh);
  for (const [part, left, top] of scrolled) [part.scrollLeft, part.scrollTop] = [left, top];
  if (focused) focused[1].focus({preventScroll: true});
}

let shown = parts(document).map((part) => part.outerHTML);

async function update() {
  const response = await fetch(location.href, {cache: "no-cache"});
  if (response.status >= 500) throw new Error(response.statusText);
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const [old, fresh] = [parts(document), parts(page)];
  const texts = fresh.map((part) => part.outerHTML);
  if (old.map((part) => part.id).join() === fresh.map((part) => part.id).join()) {
    fresh.forEach((part, index) => texts[index] === shown[index] || keep(old[index], part));
  } else {
    document.querySelector("header").replaceWith(page.querySelector("header"));
    document.querySelector("main").replaceWith(page.querySelector("main"));
  }
  shown = texts;
  document.title = page.title;
  return Number(page.body.dataset.seconds);
}

async function keepUpdating() {
  let seconds = Number(document.body.dataset.seconds);
  while (seconds) { // a page that will not change any more has none
    await new Promise((wake) => setTimeout(wake, 1000 * seconds));
    if (document.hidden) continue;
    try {
      seconds = await update();
      document.getElementById("stale").hidden = true;
    } catch {
      document.getElementById("stale").hidden = false;
    }
  }
}

keepUpdating();
