"""The page's style sheet: colours once for light and once for dark; a table that becomes cards where it is narrow."""

CSS = """\
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #ffffff; --ink: #1c2024; --quiet: #60656c; --rule: #e2e3e0; --track: #eeefec;
  --ours: #0d74ce; --naive: #a3a8ae; --good: #1d7a4f; --bad: #a8570a;
  --gradients: #8b9299; --kept: #0d74ce; --temporary: #f0a63a;
  --k0: #0d74ce; --k1: #6f767d; --k2: #b25e09; --k3: #1d7a4f;
  --k4: #7a3db8; --k5: #b3264a; --k6: #0a7a86; --k7: #6b6a12;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --card: #1c1f23; --ink: #e9ebed; --quiet: #a1a7ae; --rule: #33373c; --track: #282c31;
    --ours: #4ea3f1; --naive: #727982; --good: #5ec48f; --bad: #e5a55a;
    --gradients: #767d85; --kept: #4ea3f1; --temporary: #d9932f;
    --k0: #4ea3f1; --k1: #a1a7ae; --k2: #e5a55a; --k3: #5ec48f;
    --k4: #b98af0; --k5: #f0829c; --k6: #5cc6d0; --k7: #c9c85a;
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
.swatch.k0 { background: var(--k0); } .curve.k0 { stroke: var(--k0); } .mark.k0 { fill: var(--k0); }
.swatch.k1 { background: var(--k1); } .curve.k1 { stroke: var(--k1); } .mark.k1 { fill: var(--k1); }
.swatch.k2 { background: var(--k2); } .curve.k2 { stroke: var(--k2); } .mark.k2 { fill: var(--k2); }
.swatch.k3 { background: var(--k3); } .curve.k3 { stroke: var(--k3); } .mark.k3 { fill: var(--k3); }
.swatch.k4 { background: var(--k4); } .curve.k4 { stroke: var(--k4); } .mark.k4 { fill: var(--k4); }
.swatch.k5 { background: var(--k5); } .curve.k5 { stroke: var(--k5); } .mark.k5 { fill: var(--k5); }
.swatch.k6 { background: var(--k6); } .curve.k6 { stroke: var(--k6); } .mark.k6 { fill: var(--k6); }
.swatch.k7 { background: var(--k7); } .curve.k7 { stroke: var(--k7); } .mark.k7 { fill: var(--k7); }
.curve { fill: none; stroke-width: 1.6; } .curve.k0 { stroke-width: 3; }
.curve.k2, .curve.k6 { stroke-dasharray: 7 3; } .curve.k3, .curve.k7 { stroke-dasharray: 2 3; }
.curve.k4 { stroke-dasharray: 8 3 2 3; } .curve.k5 { stroke-dasharray: 12 4; }
.dot { fill: var(--ink); } .frame { fill: var(--card); stroke: var(--rule); }

table.numbers { table-layout: auto; margin-top: 1rem; font-variant-numeric: tabular-nums; }
.numbers th, .numbers td, .numbers thead th { padding: .3rem .8rem .3rem 0; } .numbers thead th { width: auto; }
.numbers .us td, .numbers .us th { font-weight: 600; }
.numbers td:last-child { font-weight: 400; overflow-wrap: anywhere; }

dl { display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; margin: 1.25rem 0 0; font-size: .92rem; }
dl div { display: flex; gap: .4rem; } dd { margin: 0; overflow-wrap: anywhere; }

@media (max-width: 46rem) {
  main { padding-top: 1.5rem; }
  thead { display: none; }
  table, tbody, tr, tbody th, td { display: block; width: auto; }
  tr { border-bottom: 1px solid var(--rule); padding: .9rem 0; }
  tbody th, td { border: 0; padding: .2rem 0; }
  td::before { content: attr(data-label); display: block; color: var(--quiet); font-size: .85em; margin-top: .3rem; }
  .numbers td { display: flex; justify-content: space-between; gap: 1em; } .numbers td:empty { display: none; }
  .errors span { display: inline; margin-right: 1em; }
}
@media print { details { display: none; } }
"""
