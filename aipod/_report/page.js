"use strict";

// Draws one chart for each section of the data; the menus above it choose what is drawn.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const dashes = { solid: "", dash: "7 3", dot: "2 3", dashdot: "7 3 2 3", longdash: "12 4" };

  function colour(trace) {
    return dark.matches ? trace.dark : trace.colour;
  }

  function transparent(hex, share) {
    const part = (from) => parseInt(hex.slice(from, from + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${share})`;
  }

  // Plotly reads a little HTML in names; these are only text.
  function plain(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  }

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function menu(name, title, choices) {
    const select = element("select", { name });
    choices.forEach(([value, label]) => select.append(element("option", { value }, label)));
    return [element("label", {}, title, select), select];
  }

  function check(name, title, on) {
    const box = element("input", { type: "checkbox", name });
    box.checked = on;
    return [element("label", { class: "check" }, box, title), box];
  }

  function sample(trace) {
    const space = "http://www.w3.org/2000/svg";
    const picture = document.createElementNS(space, "svg");
    const line = document.createElementNS(space, "line");
    const set = (item, pairs) => pairs.forEach(([name, value]) => item.setAttribute(name, value));
    set(picture, [["width", 38], ["height", 10], ["aria-hidden", "true"]]);
    set(line, [["x1", 1], ["x2", 37], ["y1", 5], ["y2", 5], ["stroke-width", 3]]);
    set(line, [["stroke", colour(trace)], ["stroke-dasharray", dashes[trace.dash]]]);
    picture.append(line);
    return picture;
  }

  function draw(place, section) {
    const chart = place.querySelector(".chart");
    const controls = place.querySelector(".controls");
    const legend = place.querySelector(".legend");
    const views = section.views.map((view, index) => [String(index), view.title]);
    if (views.length > 1) views.push(["all", "everything"]);
    const [viewLabel, view] = menu("view", "Compare", views);
    const [acrossLabel, across] = menu("x", "Horizontal axis", section.axes);
    const [upLabel, up] = menu("y", "Vertical axis", section.metrics.map((m) => [m.name, m.label]));
    const [logXLabel, logX] = check("log-x", "log x", false);
    const [logYLabel, logY] = check("log-y", "log y", section.metrics[0].log);
    const [bandLabel, band] = check("band", "range over seeds", true);
    if (views.length > 1) controls.append(viewLabel);
    controls.append(acrossLabel, upLabel, logXLabel, logYLabel);
    if (section.traces.some((trace) => trace.seeds > 1)) controls.append(bandLabel);
    across.value = section.axis;
    const hidden = new Set();

    function shown() {
      const chosen = section.views[Number(view.value)];
      const all = section.traces.map((_, index) => index);
      return view.value === "all" ? all : chosen.traces;
    }

    function lines(trace) {
      const [x, y] = [trace.columns[across.value], trace.columns[up.value]];
      const found = [];
      if (!x || !y) return found; // a line from elsewhere, which does not know this axis
      const range = trace.ranges[up.value];
      if (band.checked && range) {
        const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", type: "scatter" };
        const fillcolor = transparent(colour(trace), 0.17);
        found.push({ ...edge, y: range[0] }, { ...edge, y: range[1], fill: "tonexty", fillcolor });
      }
      found.push({
        x, y, name: plain(trace.label), mode: "lines", type: "scatter",
        line: { color: colour(trace), dash: trace.dash, width: 2.5 },
        hovertemplate: "<b>%{fullData.name}</b><br>%{y:.4g} at %{x:,.5~g}<extra></extra>",
      });
      return found;
    }

    // Largest over smallest value: few powers of ten leave room for 2 and 5 between them.
    function spread(select) {
      const values = shown().flatMap((index) => section.traces[index].columns[select.value] || []);
      const positive = values.filter((value) => value > 0);
      return Math.max(...positive) / Math.min(...positive);
    }

    function update() {
      const style = getComputedStyle(document.body);
      const [ink, rule] = ["--ink", "--rule"].map((name) => style.getPropertyValue(name).trim());
      const title = (select) => select.options[select.selectedIndex].text;
      const visible = shown().filter((index) => !hidden.has(index));
      const axis = (select, log) => ({
        title: { text: title(select) }, type: log.checked ? "log" : "linear",
        gridcolor: rule, linecolor: ink, zeroline: false, automargin: true,
        tickformat: ",.6~g", nticks: 8, ...(log.checked && spread(select) < 300 ? { dtick: "D2" } : {}),
      });
      Plotly.react(chart, visible.flatMap((index) => lines(section.traces[index])), {
        xaxis: { ...axis(across, logX), rangemode: "tozero" }, yaxis: axis(up, logY),
        showlegend: false, hovermode: "closest", margin: { l: 60, r: 12, t: 12, b: 50 },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: style.fontFamily, size: 14, color: ink },
        hoverlabel: { font: { size: 14 } },
      }, {
        responsive: true, displaylogo: false, toImageButtonOptions: { format: "svg" },
        // Named one by one: Plotly's own choice has a button that uploads the chart.
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
        plotlyServerURL: "",
      });
      const names = visible.map((index) => section.traces[index].label).join("; ");
      chart.setAttribute("role", "figure");
      chart.setAttribute(
        "aria-label", `Line chart: ${title(up)} against ${title(across)}, for ${names}.`
      );
    }

    function list() {
      legend.replaceChildren(...shown().map((index) => {
        const trace = section.traces[index];
        const box = element("input", { type: "checkbox" });
        box.checked = !hidden.has(index);
        box.addEventListener("change", () => {
          if (box.checked) hidden.delete(index); else hidden.add(index);
          update();
        });
        return element("li", {}, element("label", {}, box, sample(trace), trace.label));
      }));
    }

    up.addEventListener("change", () => {
      logY.checked = section.metrics.find((metric) => metric.name === up.value).log;
    });
    view.addEventListener("change", list);
    for (const control of [view, across, up, logX, logY, band]) {
      control.addEventListener("change", update);
    }
    dark.addEventListener("change", () => { list(); update(); });
    list();
    update();
  }

  data.sections.forEach((section, index) => {
    draw(document.getElementById(`section-${index}`), section);
  });
})();
