// The node map: every node a cell on one canvas, coloured by what it is after the task that the slider shows.
window.startNodeMap = function (nodes, color) {
  "use strict";
  const byId = (id) => document.getElementById(id);
  const bytes = (text) => {
    const raw = atob(text), found = new Uint8Array(raw.length);
    for (let index = 0; index < raw.length; index++) found[index] = raw.charCodeAt(index);
    return found;
  };
  const NEVER = 0xffff;
  const FREE = 0, FRESH = 1, NEW = 2, FROZEN = 3, MOVED = 4;

  const first = new Uint16Array(bytes(nodes.first).buffer);
  const count = first.length;
  const taskCount = nodes.tasks.length;
  const moved = nodes.moved.map((one) => new Set(typeof one === "string" ? new Uint32Array(bytes(one).buffer) : one));
  const fresh = nodes.fresh.map((one) => (one === null ? null : bytes(one)));
  const steps = nodes.importance ? bytes(nodes.importance.steps) : null;
  const layerOf = new Uint16Array(count);
  let start = 0;
  nodes.layers.forEach((layer, index) => {
    layer.start = start;
    layer.end = start + layer.size;
    layer.readBy = [];
    layerOf.fill(index, layer.start, layer.end);
    start = layer.end;
  });
  nodes.layers.forEach((layer, index) => layer.reads.forEach((source) => nodes.layers[source].readBy.push(index)));

  const stateAt = (node, task) => {
    if (first[node] > task) return fresh[task] && (fresh[task][node >> 3] >> (7 - (node & 7))) & 1 ? FRESH : FREE;
    if (first[node] === task) return NEW;
    return moved[task].has(node) ? MOVED : FROZEN;
  };
  const importanceAt = (node, task) =>
    steps ? (steps[task * count + node] / 255) * nodes.importance.highest[layerOf[node]][task] : null;
  const taskName = (task) => (nodes.tasks[task] === `task ${task + 1}` ? `task ${task + 1}` : `task ${task + 1}, ${nodes.tasks[task]}`);

  const canvas = byId("nodes-canvas");
  const context = canvas.getContext("2d");
  const slider = byId("task");
  const mode = byId("mode");
  const order = byId("order");
  if (!steps) byId("mode-importance").remove();
  let task = taskCount - 1;
  let chosen = -1;
  let cell = 12, gap = 2;
  const left = 1;
  const LABEL = 24;

  // By task, the nodes of the first task come first and those still free last; ties stay in the layer's own order.
  const byTask = new Uint32Array(count);
  nodes.layers.forEach((layer) => {
    const own = Array.from({ length: layer.size }, (_, index) => layer.start + index);
    byTask.set(own.sort((a, b) => first[a] - first[b] || a - b), layer.start);
  });
  let nodeIn = byTask; // the node in each place, layer by layer
  const placeIn = new Uint32Array(count); // and the place of each node

  // Where every node lies -----------------------------------------------------------------------------------------
  function layOut() {
    const width = canvas.parentElement.clientWidth;
    const widest = Math.max(...nodes.layers.map((layer) => layer.size));
    const inOneRow = Math.floor((width - 2) / widest) - 2;
    cell = count <= 400 ? 18 : count <= 1500 ? 13 : count <= 4000 ? 9 : count <= 15000 ? 7 : 4;
    if (width < 500) cell = Math.max(4, Math.round(cell * 0.8));
    if (inOneRow >= cell - 3) cell = Math.min(26, inOneRow);
    gap = cell > 8 ? 2 : 1;
    const most = Math.max(8, Math.floor((width - 2) / (cell + gap)));
    let top = 0;
    for (const layer of nodes.layers) {
      layer.rows = Math.ceil(layer.size / most);
      layer.columns = Math.ceil(layer.size / layer.rows);
      layer.top = top + LABEL;
      top += LABEL + layer.rows * (cell + gap) + 8;
    }
    nodeIn = order.value === "task" ? byTask : Uint32Array.from(byTask.keys());
    nodeIn.forEach((node, place) => { placeIn[node] = place; });
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(top * scale);
    canvas.style.height = top + "px";
    context.setTransform(scale, 0, 0, scale, 0, 0);
  }
  const placeOf = (node) => {
    const layer = nodes.layers[layerOf[node]], inside = placeIn[node] - layer.start;
    return [left + (inside % layer.columns) * (cell + gap), layer.top + Math.floor(inside / layer.columns) * (cell + gap)];
  };
  function nodeAt(x, y) {
    for (const layer of nodes.layers) {
      const row = Math.floor((y - layer.top) / (cell + gap)), column = Math.floor((x - left) / (cell + gap));
      const inside = row * layer.columns + column;
      if (row >= 0 && row < layer.rows && column >= 0 && column < layer.columns && inside < layer.size) {
        return nodeIn[layer.start + inside];
      }
    }
    return -1;
  }

  // Colours and marks -----------------------------------------------------------------------------------------------
  const RAMP = ["#dfe9f2", "#b7d0e5", "#86b3d6", "#5794c3", "#3274ab", "#17558c", "#0a3a68"];
  const STATE_COLORS = { [NEW]: "#009e73", [FROZEN]: "#0072b2", [MOVED]: nodes.movedColor };
  function fillOf(node, state) {
    if (state === FREE || state === FRESH) return color("--free");
    if (state === MOVED) return nodes.movedColor;
    if (mode.value === "state") return STATE_COLORS[state];
    if (mode.value === "importance") return RAMP[Math.min(RAMP.length - 1, Math.floor((steps[task * count + node] / 256) * RAMP.length))];
    return nodes.colors[first[node]];
  }
  // A mark tells states apart without colour: a ring is new, a stroke through is moved, a dot is fresh.
  function markCells(target, state, cells, size, ink) {
    target.beginPath();
    for (const [x, y] of cells) {
      if (state === NEW) target.rect(x + 1, y + 1, size - 2, size - 2);
      if (state === MOVED) { target.moveTo(x + 1.5, y + size - 1.5); target.lineTo(x + size - 1.5, y + 1.5); }
      if (state === FRESH) target.rect(x + size / 2 - 1, y + size / 2 - 1, 2, 2);
    }
    if (state === FRESH) { target.fillStyle = color("--fresh"); target.fill(); return; }
    target.lineWidth = size > 8 ? 2 : 1;
    target.strokeStyle = state === MOVED ? "#ffffff" : ink;
    target.stroke();
  }

  function draw() {
    const width = canvas.clientWidth, ink = color("--ink"), soft = color("--soft");
    context.clearRect(0, 0, width, canvas.clientHeight);
    const free = color("--free");
    const byColor = new Map();
    const byState = [[], [], [], [], []];
    const freeIn = nodes.layers.map(() => 0);
    for (let node = 0; node < count; node++) {
      const state = stateAt(node, task);
      const place = placeOf(node);
      const fill = state <= FRESH ? free : fillOf(node, state);
      if (!byColor.has(fill)) byColor.set(fill, []);
      byColor.get(fill).push(place);
      byState[state].push(place);
      if (state <= FRESH) freeIn[layerOf[node]] += 1;
    }
    for (const [fill, cells] of byColor) {
      context.fillStyle = fill;
      for (const [x, y] of cells) context.fillRect(x, y, cell, cell);
    }
    if (cell >= 6) [FRESH, NEW, MOVED].forEach((state) => markCells(context, state, byState[state], cell, ink));
    context.textBaseline = "alphabetic";
    nodes.layers.forEach((layer, index) => {
      context.font = "600 13px " + getComputedStyle(document.body).fontFamily;
      context.fillStyle = ink;
      context.fillText(layer.name, left, layer.top - 7);
      const wide = context.measureText(layer.name).width;
      context.font = "13px " + getComputedStyle(document.body).fontFamily;
      context.fillStyle = soft;
      context.fillText(`${layer.size.toLocaleString("en")} nodes, ${freeIn[index].toLocaleString("en")} free`, left + wide + 10, layer.top - 7);
    });
    if (chosen >= 0) drawChosen(ink);
    showCounts(byState);
  }

  // What a node reads and who reads it ------------------------------------------------------------------------------
  // The rule of zeros, as the certificate has it: which nodes an important node reads once the chosen task is learned.
  function readsAt(node, source) {
    if (nodes.zero_rule === "off" || first[node] > task) return true;
    if (nodes.zero_rule === "while_free" || nodes.zero_rule === "earlier_tasks") return first[source] <= task;
    return first[source] <= first[node];
  }
  function neighbours(node) {
    const own = nodes.layers[layerOf[node]];
    const sources = own.reads.map((index) => {
      const layer = nodes.layers[index], found = [];
      for (let other = layer.start; other < layer.end; other++) if (readsAt(node, other)) found.push(other);
      return { layer, found };
    });
    const readers = own.readBy.map((index) => {
      const layer = nodes.layers[index], found = [];
      for (let other = layer.start; other < layer.end; other++) if (readsAt(other, node)) found.push(other);
      return { layer, found };
    });
    return { sources, readers };
  }
  function drawChosen(ink) {
    const { sources, readers } = neighbours(chosen);
    const frame = (cells, paint, wide) => {
      context.beginPath();
      for (const node of cells) { const [x, y] = placeOf(node); context.rect(x - 0.5, y - 0.5, cell + 1, cell + 1); }
      context.strokeStyle = paint;
      context.lineWidth = wide;
      context.stroke();
    };
    sources.forEach((one) => frame(one.found, color("--select"), 1.4));
    readers.forEach((one) => frame(one.found, color("--select"), 1.4));
    const [x, y] = placeOf(chosen);
    context.strokeStyle = color("--select");
    context.lineWidth = 3;
    context.strokeRect(x - 3, y - 3, cell + 6, cell + 6);
  }

  // Words -----------------------------------------------------------------------------------------------------------
  const add = (parent, kind, text, name) => {
    const element = document.createElement(kind);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    parent.append(element);
    return element;
  };
  const number = (value) => value.toLocaleString("en");
  function showCounts(byState) {
    const [free, fresh_, new_, frozen, moved_] = byState.map((one) => one.length);
    const line = byId("counts");
    line.replaceChildren();
    add(line, "b", number(new_));
    line.append(" taken by this task, ");
    add(line, "b", number(frozen));
    line.append(" frozen, ");
    add(line, "b", number(moved_));
    line.append(" moved, ");
    add(line, "b", number(free + fresh_));
    line.append(` of ${number(count)} free`);
  }

  function describe(node) {
    const box = byId("node");
    box.replaceChildren();
    box.classList.toggle("chosen", node >= 0);
    if (node < 0) { add(box, "p", "Click a node, or use the arrow keys on the map.", "hint"); return; }
    const layer = nodes.layers[layerOf[node]], state = stateAt(node, task);
    add(box, "h3", `Node ${number(node - layer.start)} of ${layer.name}`);
    const since = first[node];
    const words = {
      [FREE]: "Free: no task has needed it so far.",
      [FRESH]: "Free, with fresh weights for the next task.",
      [NEW]: `Taken by ${taskName(since === NEVER ? 0 : since)}, the task shown: important from now on.`,
      [FROZEN]: `Important since ${taskName(since === NEVER ? 0 : since)}. Frozen: this task left every bit as it was.`,
      [MOVED]: `Important since ${taskName(since === NEVER ? 0 : since)}. Moved: this task changed its weights.`,
    };
    add(box, "p", words[state]);
    if (since > task && since !== NEVER) add(box, "p", `It will be taken by ${taskName(since)}.`, "hint");
    const changes = moved.map((one, index) => (one.has(node) ? index + 1 : 0)).filter(Boolean);
    if (since <= task) add(box, "p", changes.length ? `It moved while learning task ${changes.join(", ")}.` : "It never moved.");
    const { sources, readers } = neighbours(node);
    if (!sources.length) add(box, "p", "Reads the input.");
    for (const { layer: other, found } of sources) {
      const rest = other.size - found.length;
      const zero = rest && since <= task ? `; its weights from the other ${number(rest)} are exactly 0` : "";
      add(box, "p", `Reads ${number(found.length)} of the ${number(other.size)} nodes of ${other.name}${zero}.`);
      const later = nodes.zero_rule === "earlier_tasks" && since <= task ? found.filter((source) => first[source] > since).length : 0;
      if (later) add(box, "p", `It learned to read ${number(later)} of them later; tasks before those do not see that.`);
    }
    for (const { layer: other, found } of readers) {
      add(box, "p", `Read by ${number(found.length)} of the ${number(other.size)} nodes of ${other.name}.`);
    }
    if (!readers.length) {
      const from = since > task ? "no head yet" : since === taskCount - 1 || since === task ? `the head of ${taskName(since)}` : `the heads of tasks ${since + 1} to ${task + 1}`;
      add(box, "p", `Read by ${from}.`);
    }
    if (!steps) { add(box, "p", "This run did not record importances.", "hint"); return; }
    const values = nodes.tasks.map((one, index) => importanceAt(node, index));
    const top = Math.max(...values);
    add(box, "p", top ? `Importance after each task; now ${values[task].toPrecision(3)}, at most ${top.toPrecision(3)}:` : "Its importance was always 0.");
    if (!top) return;
    const bars = add(box, "div", undefined, "bars");
    bars.setAttribute("role", "img");
    bars.setAttribute("aria-label", "Importance after each task: " + values.map((value) => value.toPrecision(2)).join(", "));
    values.forEach((value, index) => {
      const bar = add(bars, "i", undefined, (index === task ? "now" : "") + (value ? "" : " none"));
      bar.style.height = Math.max(2, (100 * value) / top) + "%";
      bar.title = `${taskName(index)}: ${value.toPrecision(3)}`;
    });
  }

  function showLegend() {
    const list = byId("legend");
    list.replaceChildren();
    const entry = (state, fill, words) => {
      const item = add(list, "li");
      const picture = add(item, "canvas");
      picture.width = picture.height = 28;
      const target = picture.getContext("2d");
      target.scale(2, 2);
      target.fillStyle = fill;
      target.fillRect(0, 0, 14, 14);
      if (state !== undefined) markCells(target, state, [[0, 0]], 14, color("--ink"));
      item.append(words);
    };
    const ramp = (colors, words) => {
      const item = add(list, "li");
      const strip = add(item, "span", undefined, "ramp");
      strip.style.background = `linear-gradient(90deg, ${colors.join(",")})`;
      item.append(words);
    };
    entry(undefined, color("--free"), "free");
    if (fresh.some((one) => one)) entry(FRESH, color("--free"), "free, with fresh weights");
    if (mode.value === "state") {
      entry(NEW, STATE_COLORS[NEW], "taken by this task (ringed)");
      entry(undefined, STATE_COLORS[FROZEN], "frozen: every bit as before");
    } else {
      if (mode.value === "task") ramp(nodes.colors, `important since: first to last task`);
      else ramp(RAMP, "importance: low to high in its layer");
      entry(NEW, mode.value === "task" ? nodes.colors[Math.min(task, taskCount - 1)] : RAMP[3], "ringed: taken by this task");
    }
    entry(MOVED, nodes.movedColor, "moved in this task (struck)");
  }

  // What a person does ----------------------------------------------------------------------------------------------
  let lastName = "";
  function show(next) {
    task = Math.max(0, Math.min(taskCount - 1, next));
    slider.value = String(task);
    const name = `after ${taskName(task)}`;
    if (name !== lastName) {
      byId("task-name").textContent = lastName = name;
      slider.setAttribute("aria-valuetext", name);
    }
    draw();
    if (mode.value === "task") showLegend();
    if (chosen >= 0) describe(chosen);
  }
  function choose(node) {
    chosen = node;
    draw();
    describe(node);
  }
  slider.max = String(taskCount - 1);
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  order.addEventListener("change", () => { layOut(); draw(); });
  mode.addEventListener("change", () => { showLegend(); draw(); });
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    choose(nodeAt(event.clientX - box.left, event.clientY - box.top));
  });
  canvas.addEventListener("keydown", (event) => {
    const wide = chosen < 0 ? 1 : nodes.layers[layerOf[chosen]].columns;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide };
    if (event.key === "Escape") choose(-1);
    if (!(event.key in moves)) return;
    event.preventDefault();
    choose(nodeIn[chosen < 0 ? 0 : Math.max(0, Math.min(count - 1, placeIn[chosen] + moves[event.key]))]);
  });
  let timer = 0;
  const play = byId("play");
  function stop() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶";
    play.setAttribute("aria-label", "Play all tasks");
  }
  play.addEventListener("click", () => {
    if (timer) { stop(); return; }
    if (task === taskCount - 1) show(0);
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "Pause");
    timer = setInterval(() => { if (task >= taskCount - 1) stop(); else show(task + 1); }, Math.max(120, Math.min(900, 6000 / taskCount)));
  });

  byId("node-map").hidden = false;
  byId("node-picture").hidden = true;
  function resize() { layOut(); draw(); }
  layOut();
  showLegend();
  show(taskCount - 1);
  return { redraw() { showLegend(); draw(); }, resize, show, choose, nodeAt, placeOf };
};
