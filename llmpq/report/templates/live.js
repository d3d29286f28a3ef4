{# A page that asks for itself again, and changes only what has changed, so that nothing flickers. #}
(() => {
  const seconds = Number(document.currentScript.dataset.seconds);
  const parts = root => [root.querySelector("header"), ...root.querySelectorAll("main > *")];
  const alike = (part, element) => [...part.querySelectorAll(element.tagName)];

  function replace(old, now) {
    const open = [...old.querySelectorAll("details")].map(each => each.open);
    const focused = document.activeElement, place = alike(old, focused).indexOf(focused);
    old.replaceChildren(...now.childNodes);
    old.querySelectorAll("details").forEach((each, place) => { each.open = open[place] || false; });
    if (place >= 0) alike(old, focused)[place]?.focus({ preventScroll: true });
  }

  function show(found) {
    const before = parts(document), after = parts(found);
    document.title = found.title;
    if (before.map(each => each.id).join() !== after.map(each => each.id).join()) {
      replace(document.querySelector("header"), found.querySelector("header"));
      replace(document.querySelector("main"), found.querySelector("main"));
      return;
    }
    before.forEach((old, place) => {
      if (old.innerHTML !== found.adoptNode(after[place]).innerHTML) replace(old, after[place]);
    });
  }

  async function look() {
    let isThere = true;
    if (!document.hidden && getSelection().isCollapsed) {
      try {
        const answer = await fetch(location.href);
        isThere = answer.ok;
        if (isThere) show(new DOMParser().parseFromString(await answer.text(), "text/html"));
      } catch {
        isThere = false;
      }
      document.getElementById("gone").hidden = isThere;
    }
    setTimeout(look, 1000 * seconds);
  }

  setTimeout(look, 1000 * seconds);
})();
