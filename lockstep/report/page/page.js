"use strict";
// Draws the figures of the page in the colours of the reader's scheme, again when that, or the width, changes.
(() => {
  const NARROW_PX = 640, PRINT_PX = 680;
  const COLORS = new Set(["ink", "paper", "c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"]);
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia(`(max-width: ${NARROW_PX}px)`);
  root.classList.add("js");

  const css = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // A copy with the names of colours replaced by colours.
  function paint(value, key) {
    if (Array.isArray(value)) return value.map((item) => paint(item, key));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, paint(item, name)]));
    }
    return key === "color" && COLORS.has(value) ? css(value) : value;
  }

  // The middle is left out, as names often begin alike and end apart.
  function cut(text, most) {
    const raw = text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
    const half = Math.floor(most / 2);
    const short = raw.length > most ? `${raw.slice(0, half)}…${raw.slice(1 - half)}` : raw;
    return short.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  // Names beside the bars or, where there is no room, above them.
  function placeNames(data, layout, small) {
    const names = layout.yaxis.ticktext;
    if (!names) return 0;
    if (!small) {
      layout.yaxis.ticktext = names.map((name) => cut(name, 52));
      return 0;
    }
    layout.yaxis.showticklabels = false;
    layout.yaxis.range = [names.length - 0.4, -0.9];
    for (const trace of data) trace.width = 0.42;
    layout.annotations = names.map((name, place) => ({
      text: cut(name, 52), x: 0, xref: "paper", xanchor: "left", y: place - 0.22, yref: "y", yanchor: "bottom",
      showarrow: false, font: { size: 10 },
    }));
    return 18 * names.length;
  }

  function draw(number, printing) {
    const div = document.getElementById(`plot${number}`);
    const small = narrow.matches && !printing;
    const { data, layout } = paint(figures[number], "");
    const axis = { gridcolor: css("line"), zerolinecolor: css("line"), linecolor: css("line"), automargin: true };
    const more = placeNames(data, layout, small);
    const named = data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name.length);
    const shown = named.length;
    div.dataset.height ??= parseInt(div.style.height, 10);
    const each = 45 + 6.5 * Math.max(...named, 1); // pixels of a name in the legend, about
    const lines = Math.ceil(shown / Math.max(Math.floor((div.clientWidth - 70) / each), 1));
    const height = Number(div.dataset.height) + more + 19 * Math.max(lines - 1, 0);
    div.style.height = `${height}px`;
    Object.assign(layout, {
      xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
      autosize: true, height, width: printing ? PRINT_PX : undefined,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("ink"), size: small ? 11 : 12, family: "system-ui, Segoe UI, Roboto, Arial, sans-serif" },
      margin: { l: small ? 8 : 56, r: 14, t: 10, b: 46, pad: small ? 0 : 4 },
      legend: { orientation: "h", traceorder: "normal", x: 0, y: 1, yanchor: "bottom", font: { size: small ? 10 : 12 } },
      hovermode: "closest", dragmode: small ? false : "zoom", bargap: 0.25,
      hoverlabel: { namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("faint"), activecolor: css("ink") },
    });
    layout.showlegend ??= shown > 1 || (shown === 1 && data.length > 1);
    Plotly.react(div, data, layout, {
      responsive: !printing, displaylogo: false, displayModeBar: small || printing ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]], // none that shares
    });
  }

  // One after another, so that the page can be read meanwhile.
  let turn = 0;
  function drawAll() {
    const mine = ++turn;
    delete root.dataset.drawn;
    const next = (number) => {
      if (mine !== turn) return;
      if (number === figures.length) {
        root.dataset.drawn = String(number);
        return;
      }
      draw(number, false);
      setTimeout(() => next(number + 1), 0);
    };
    next(0);
  }

  const closed = [];
  window.addEventListener("beforeprint", () => {
    turn++;
    root.classList.add("printing");
    for (const each of document.querySelectorAll("details:not([open])")) {
      each.open = true;
      closed.push(each);
    }
    figures.forEach((_, number) => draw(number, true));
  });
  window.addEventListener("afterprint", () => {
    root.classList.remove("printing");
    for (const each of closed.splice(0)) each.open = false;
    drawAll();
  });
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  drawAll();
})();
