"""The page's style sheet: colours once for light and once for dark; a table that becomes cards where it is narrow."""

CSS = """\
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #ffffff; --ink: #1c2024; --quiet: #60656c; --rule: #e2e3e0; --track: #eeefec;
  --ours: #0d74ce; --naive: #a3a8ae; --good: #1d7a4f; --bad: #a8570a;
  --gradients: #8b9299; --kept: #0d74ce; --temporary: #f0a63a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --card: #1c1f23; --ink: #e9ebed; --quiet: #a1a7ae; --rule: #33373c; --track: #282c31;
    --ours: #4ea3f1; --naive: #727982; --good: #5ec48f; --bad: #e5a55a;
    --gradients: #767d85; --kept: #4ea3f1; --temporary: #d9932f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.02em; }
h2 { font-size: 1.3rem; margin: 3rem 0 .75rem; }
p, li { max-width: 46rem; }
.lead { font-size: 1.08rem; }
small, .quiet, .key, figcaption, dt { color: var(--quiet); }
code, pre { font: .88em/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre code { font-size: 1em; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: .9rem 1rem;
  overflow-x: auto; overflow-wrap: normal; }
sup { line-height: 0; font-size: .75em; }
em { font-style: normal; color: var(--quiet); }
li em { font-style: italic; color: inherit; }

.tiles { list-style: none; padding: 0; margin: 1.75rem 0 0; display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); }
.tiles li { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem; padding: .9rem 1.1rem; }
.tiles b { display: block; font-size: 1.9rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tiles small { display: block; }

.swatch { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin-right: .15em;
  vertical-align: -.05em; }
.entry { white-space: nowrap; margin-right: .7em; }
.ours { background: var(--ours); } .naive { background: var(--naive); }
.swatch.gradients { background: var(--gradients); } .swatch.kept { background: var(--kept); }
.swatch.temporary { background: var(--temporary); }

table { width: 100%; table-layout: fixed; border-collapse: collapse; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .8rem 1.2rem .8rem 0; border-bottom: 1px solid var(--rule); }
thead th { font-weight: 600; color: var(--quiet); padding: .4rem 1.2rem .4rem 0; }
thead th:first-child { width: 37%; } thead th:last-child { width: 10%; }
tbody th { font-weight: 400; }
td:last-child, thead th:last-child { padding-right: 0; }
.name { font-weight: 600; }
.formula { display: block; color: var(--quiet); }
summary { cursor: pointer; color: var(--quiet); font-size: .92em; }
details code { color: var(--ink); }
.line { display: grid; grid-template-columns: 1fr 3.2em; align-items: center; gap: .5em;
  font-variant-numeric: tabular-nums; }
.line > :last-child { text-align: right; }
.track { background: var(--track); border-radius: .2rem; height: .7rem; }
.bar { display: block; height: 100%; min-width: 2px; border-radius: .2rem; }
.gain { font-size: .88em; font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.errors { white-space: nowrap; font-variant-numeric: tabular-nums; }
.errors span { display: block; }

.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: .6rem; padding: .9rem; }
figcaption { font-size: .92rem; margin-top: .4rem; } figcaption b { color: var(--ink); }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--quiet); font-variant-numeric: tabular-nums; }
svg text.strong { fill: var(--ink); font-weight: 600; }
path.gradients { fill: var(--gradients); } path.kept { fill: var(--kept); } path.temporary { fill: var(--temporary); }
line.grid { stroke: var(--rule); } line.axis { stroke: var(--quiet); }
line.phase { stroke: var(--quiet); stroke-dasharray: 2 3; } line.peak { stroke: var(--ink); stroke-dasharray: 5 4; }
.dot { fill: var(--ink); } .frame { fill: var(--card); stroke: var(--rule); }

dl { display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; margin: 1.25rem 0 0; font-size: .92rem; }
dl div { display: flex; gap: .4rem; } dd { margin: 0; overflow-wrap: anywhere; }

@media (max-width: 46rem) {
  main { padding-top: 1.5rem; }
  thead { display: none; }
  table, tbody, tr, tbody th, td { display: block; width: auto; }
  tr { border-bottom: 1px solid var(--rule); padding: .9rem 0; }
  tbody th, td { border: 0; padding: .2rem 0; }
  td::before { content: attr(data-label); display: block; color: var(--quiet); font-size: .85em; margin-top: .3rem; }
  .errors span { display: inline; margin-right: 1em; }
}
@media print { details { display: none; } }
"""
