// Draws the view from view.json. Inserts all text as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);

function make(tag, text, kind) {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = kind || "";
  return element;
}

function bar(parts) {
  const element = make("div", "", "bar");
  for (const [kind, share] of parts) {
    const part = make("i", "", kind);
    part.style.width = `${100 * share}%`;
    element.append(part);
  }
  return element;
}

// Each cell carries its column's name, which a narrow screen shows beside the cell.
function cell(content, column) {
  const element = make("td", typeof content === "string" ? content : "");
  element.dataset.column = column;
  if (content.parts) element.append(bar(content.parts));
  return element;
}

function table(view) {
  const head = make("tr", "");
  head.append(...view.heads.map((name) => make("th", name)));
  const thead = make("thead", "");
  thead.append(head);
  const body = make("tbody", "");
  for (const cells of view.rows) {
    const row = make("tr", "");
    row.append(...cells.map((each, at) => cell(each, at ? view.heads[at] : "")));
    body.append(row);
  }
  const drawn = make("table", "");
  drawn.append(thead, body);
  const section = make("section", "");
  section.append(drawn);
  return section;
}

function card([big, words]) {
  const box = make("div", "");
  box.append(make("b", big), make("span", words));
  return box;
}

function draw(shown) {
  byId("title").textContent = shown.title;
  byId("cards").replaceChildren(...shown.cards.map(card));
  byId("cards").hidden = !shown.cards.length;
  byId("notes").replaceChildren(...shown.notes.map(([words, bad]) => make("p", words, bad ? "bad" : "")));
  const tables = shown.recent.rows.length ? [...shown.tables, shown.recent] : shown.tables;
  byId("tables").replaceChildren(...tables.map(table));
  document.querySelector("main").hidden = false;
}

async function look() {
  let pause = 1;
  let error = "";
  try {
    const reply = await fetch("view.json", { cache: "no-store" });
    const data = await reply.json();
    pause = data.interval || 1;
    error = data.error;
    if (data.shown) draw(data.shown);
  } catch {
    error = "The server of this page does not answer. Start it again: kvferry top --web";
  }
  byId("error").hidden = !error;
  byId("error").textContent = error;
  setTimeout(look, 1000 * pause);
}

look();
