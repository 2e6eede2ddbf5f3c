// Turns the page's pictures into charts that answer, switches the theme, and reloads while a run goes on.
(function () {
  "use strict";
  const root = document.documentElement;
  const inflate = async (id) => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (one) => one.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  };
  const wanted = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wanted.matches);
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // Vega is most of the page: it is unpacked when the first chart is drawn.
  let vega = null;
  function loadVega() {
    vega ??= inflate("vega").then((text) => {
      const script = document.createElement("script");
      script.textContent = text;
      document.head.append(script);
    });
    return vega;
  }

  let charts = {};
  let config = {};
  const drawn = new Map();
  async function drawChart(place) {
    const spec = charts[place.dataset.chart];
    if (!spec) return;
    await loadVega();
    if (!place.clientWidth) return;
    const fitted = JSON.parse(JSON.stringify(spec));
    if (place.clientWidth < 460) narrowLegends(fitted);
    const box = document.createElement("div");
    box.style.width = "100%";
    const height = place.clientHeight;
    place.style.minHeight = height + "px";
    place.replaceChildren(box);
    const options = { actions: false, renderer: "svg", config, tooltip: { theme: isDark() ? "dark" : "light" } };
    const before = drawn.get(place);
    if (before) before.finalize();
    drawn.set(place, await window.vegaEmbed(box, fitted, options));
    place.dataset.drawn = "yes";
    place.style.minHeight = "";
  }

  function narrowLegends(value) {
    if (!value || typeof value !== "object") return;
    if (value.legend && value.legend.columns) value.legend.columns = 2;
    if (value.axis && value.axis.labelLimit) value.axis.labelLimit = 90;
    Object.entries(value).forEach(([key, one]) => { if (key !== "data") narrowLegends(one); });
  }

  // A chart is drawn when it is about to be seen, so that the page opens at once.
  const waiting = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        waiting.unobserve(entry.target);
        drawChart(entry.target);
      }
    }
  }, { rootMargin: "200px" });

  let map = null;
  const button = document.getElementById("theme");
  function showTheme() {
    document.getElementById("theme-name").textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to the light theme" : "Switch to the dark theme");
    button.setAttribute("aria-pressed", String(isDark()));
    if (map) map.redraw();
  }
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("agscl-theme", root.dataset.theme); } catch (error) { /* a page from a file may not */ }
    showTheme();
  });
  try { root.dataset.theme = localStorage.getItem("agscl-theme") || ""; } catch (error) { /* as above */ }
  if (!root.dataset.theme) delete root.dataset.theme;
  wanted.addEventListener("change", showTheme);
  showTheme();

  let width = window.innerWidth;
  let timer = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(() => { drawn.forEach((view, place) => drawChart(place)); if (map) map.resize(); }, 150);
  });

  // On paper the page is light, with all tables open.
  let chosenTheme = "";
  window.addEventListener("beforeprint", () => {
    chosenTheme = root.dataset.theme || "";
    root.dataset.theme = "light";
    if (map) map.redraw();
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
  });
  window.addEventListener("afterprint", () => {
    if (chosenTheme) root.dataset.theme = chosenTheme; else delete root.dataset.theme;
    if (map) map.redraw();
  });

  // While a run is watched, its server says when there is more to see.
  if (root.dataset.version) {
    setInterval(async () => {
      try {
        const version = await (await fetch("/version")).text();
        if (version !== root.dataset.version) location.reload();
      } catch (error) { /* the server has ended: the page stays as it is */ }
    }, 2000);
  }

  async function start() {
    const data = JSON.parse(await inflate("data"));
    ({ charts, config } = data);
    if (data.nodes) map = window.startNodeMap(data.nodes, color);
    document.querySelectorAll(".chart").forEach((place) => waiting.observe(place));
    window.agsclReady = true;
  }
  if (window.DecompressionStream) start(); // browsers from before 2023 keep the pictures
})();
