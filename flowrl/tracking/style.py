"""The style sheet of the run report: light and dark, from a phone to a wide screen."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fff; --card: #f6f8fa; --ink: #1f2328; --muted: #656d76; --rule: #d8dee4;
  --better: #1a7f37; --worse: #b42318;
  --s0: #0969da; --s1: #bc4c00; --s2: #1a7f37; --s3: #8250df; --s4: #bf3989; --s5: #6e7781;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0d1117; --card: #161b22; --ink: #e6edf3; --muted: #8d96a0; --rule: #30363d;
    --better: #3fb950; --worse: #f85149;
    --s0: #58a6ff; --s1: #f0883e; --s2: #3fb950; --s3: #bc8cff; --s4: #f778ba; --s5: #8b949e;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1120px; padding: 40px 20px 80px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 48px 0 16px; font-size: 19px; }
.lead, figcaption, .note { color: var(--muted); }
.lead { margin: 6px 0 28px; }
.cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 230px), 1fr)); }
.card { padding: 16px 18px; border-radius: 10px; background: var(--card); }
.card .name { color: var(--muted); font-size: 14px; }
.card .value { font-size: 28px; font-weight: 650; font-variant-numeric: tabular-nums; }
.card .from { color: var(--muted); font-size: 14px; font-variant-numeric: tabular-nums; }
.better { color: var(--better); } .worse { color: var(--worse); }
.sheet { overflow-x: auto; }
.sheet img { display: block; width: 100%; min-width: 720px; border: 1px solid var(--rule); border-radius: 10px; }
.charts { display: grid; gap: 28px 24px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
figure { margin: 0; min-width: 0; }
figure h3 { margin: 0 0 4px; font-size: 15px; font-weight: 600; }
figcaption { font-size: 13px; }
figcaption span { margin-right: 14px; white-space: nowrap; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.key {
  display: inline-block; width: 14px; height: 3px; margin-right: 6px; border-radius: 2px;
  vertical-align: middle; background: currentColor;
}
.grid { stroke: var(--rule); stroke-width: 1; fill: none; opacity: 0.7; }
.axis { stroke: var(--muted); stroke-width: 1; fill: none; }
.tick { fill: var(--muted); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.limit { stroke: var(--muted); stroke-width: 1.4; stroke-dasharray: 5 4; fill: none; }
.line, .faint { stroke: currentColor; fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.faint { stroke-width: 1.2; opacity: 0.35; }
.dot { fill: currentColor; }
.hover { fill: currentColor; opacity: 0; } .hover:hover { opacity: 1; }
.series0 { color: var(--s0); } .series1 { color: var(--s1); } .series2 { color: var(--s2); }
.series3 { color: var(--s3); } .series4 { color: var(--s4); } .series5 { color: var(--s5); }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
th, td {
  padding: 7px 12px 7px 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
  overflow-wrap: anywhere;
}
th { color: var(--muted); font-weight: 500; }
td.n, th.n {
  text-align: right; padding: 7px 0 7px 12px; font-variant-numeric: tabular-nums; white-space: nowrap;
  overflow-wrap: normal;
}
.bar { display: block; height: 8px; min-width: 2px; border-radius: 4px; background: var(--s0); }
td.bars { width: 45%; vertical-align: middle; }
.facts th { width: 150px; }
details { margin-top: 14px; border-top: 1px solid var(--rule); padding-top: 12px; }
summary { cursor: pointer; font-weight: 600; }
pre {
  overflow-x: auto; padding: 16px 18px; border-radius: 10px; background: var(--card);
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace;
}
code { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
"""
