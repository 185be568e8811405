// Elements, from data. Text goes in as text: nothing here reads HTML.
const SVG = "http://www.w3.org/2000/svg";

const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
};

export const $ = (id) => document.getElementById(id);
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Sets text only where it changed, so that a selection or a screen reader isn't disturbed each second.
export const say = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

// One child per item, kept by key: what the user has focused stays the same element.
export const keep = (parent, items, key, make, update) => {
  const known = parent._kept ?? (parent._kept = new Map());
  const wanted = new Map(items.map((item) => [key(item), item]));
  for (const [name, node] of known) {
    if (!wanted.has(name)) {
      node.remove();
      known.delete(name);
    }
  }
  let before = null;
  for (const [name, item] of wanted) {
    let node = known.get(name);
    if (!node) {
      node = make(item);
      known.set(name, node);
    }
    update(node, item);
    const place = before ? before.nextSibling : parent._first ? parent._first.nextSibling : parent.firstChild;
    if (place !== node) parent.insertBefore(node, place);
    before = node;
  }
};

export const width = (node, share) => {
  node.style.width = `${(Math.max(0, Math.min(1, share)) * 100).toFixed(1)}%`;
};
