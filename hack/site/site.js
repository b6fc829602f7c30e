// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

const root = document.documentElement.dataset.root;
const box = document.getElementById('search');
const results = document.getElementById('results');
let sections; // set by index.js, when the search is used

function script(attributes) {
  document.head.append(Object.assign(document.createElement('script'), attributes));
}

// synonyms has what the pages say in place of words that readers type.
const synonyms = { disable: ['switch it off', 'switch off', 'stop one', '.enabled: false'], enable: ['switch it on', 'switches on', '.enabled: true'],
  delete: ['remove'], remove: ['delete'], rollback: ['roll back'], error: ['fail'], chart: ['helm'], ratelimit: ['throttle', 'rate limit', 'kube-api-qps'], notready: ['nostandby', 'not ready', 'readyz'],
  memory: ['sizing', 'oomkilled'], logging: ['log level'], permissions: ['what it may do'], down: ['away'],
  scaletozero: ['emergency stop', 'replicas=0', 'to 0'] };

// phrases has the key in synonyms of what readers type in several words.
const phrases = [[/\brate[ -]?limit(s|ed|ing)?\b/g, 'ratelimit'], [/\bnot ready\b/g, 'notready'], [/\b(replicas|scale(d)?( down)? to) (0|zero)\b/g, 'scaletozero']];

// weight ranks the pages that say what to do before those that explain decisions, history and measurements.
const weight = (section) => /^(docs\/(adr|bench)\/|CHANGELOG|docs\/operate\/renamed)/.test(section.URL) ? 0.4 : /^docs\/(start|operate|controllers)\//.test(section.URL) ? 1.2 : 1;

// score is 0 if a word, or a synonym of it, is neither in the section nor in the title of its page.
function score(section, words) {
  const [page, title, text] = [section.Page, section.Title, section.Text].map((s) => s.toLowerCase());
  const one = (word) => (title === word) * 40 + title.includes(word) * 20 + page.includes(word) * 8 + Math.min(text.split(word).length - 1, 5);
  let sum = 0;
  for (const word of words) {
    const best = Math.max(one(word), ...(synonyms[word] ?? []).map((s) => one(s) / 2));
    if (!best) return 0;
    sum += best;
  }
  return (sum + text.includes(words.join(' ')) * 3) * weight(section);
}

function show() {
  const typed = phrases.reduce((text, [phrase, key]) => text.replace(phrase, key), box.value.toLowerCase());
  let words = typed.split(/\s+/).filter(Boolean);
  results.hidden = !words.length || !sections;
  if (results.hidden) return;
  words = words.filter((w) => sections.some((s) => score(s, [w]))); // a word that no page has is left out
  const ranked = (rank) => !words.length ? [] : sections.map((s) => [rank(s), s]).filter(([n]) => n).sort(([a], [b]) => b - a).slice(0, 25);
  let found = ranked((s) => score(s, words));
  if (!found.length) found = ranked((s) => words.reduce((sum, w) => sum + score(s, [w]), 0)); // no section has all words
  results.replaceChildren(...found.map(([, s]) => {
    const a = Object.assign(document.createElement('a'), { href: root + s.URL });
    const start = Math.max(0, s.Text.toLowerCase().indexOf(words[0]) - 60);
    const small = Object.assign(document.createElement('small'), { textContent: s.Text.slice(start, start + 180) });
    a.append(s.Page === s.Title ? s.Page : s.Page + ' › ' + s.Title, small);
    const item = document.createElement('li');
    item.append(a);
    return item;
  }));
  if (!found.length) results.innerHTML = '<li><p>Nothing found.</p></li>';
}

box.addEventListener('focus', () => sections || script({ src: root + 'index.js', onload: show }), { once: true });
box.addEventListener('input', show);
document.addEventListener('keydown', (e) => {
  if (e.key === '/' && e.target !== box) e.preventDefault(), box.focus();
  if (e.key === 'Escape') results.hidden = true;
  if (e.key === 'Enter' && e.target === box) results.querySelector('a')?.click();
});
document.addEventListener('click', (e) => { if (!e.target.closest('search') || e.target.closest('a')) results.hidden = true; });

// Without the network, a diagram remains text.
const diagrams = [...document.querySelectorAll('code.language-mermaid')];
if (diagrams.length) {
  script({
    src: 'https://cdn.jsdelivr.net/npm/mermaid@12.3.0/dist/mermaid.min.js', crossOrigin: 'anonymous',
    integrity: 'sha384-HHW54r639fK42Ip0coGF3mz8oSiGn0eEoWNTLs75X7H63pLSDBa0Tqs0RwGmLlXE',
    onload() {
      mermaid.initialize({ startOnLoad: false, theme: matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'default' });
      for (const code of diagrams) Object.assign(code.parentElement, { className: 'mermaid', textContent: code.textContent });
      mermaid.run();
    },
  });
}

// Each block, but a diagram, has a button that copies it.
for (const pre of document.querySelectorAll('main pre:not(:has(.language-mermaid))')) {
  const block = Object.assign(document.createElement('div'), { className: 'block' });
  const button = Object.assign(document.createElement('button'), { textContent: 'Copy' });
  button.onclick = () => navigator.clipboard.writeText(pre.textContent).then(() => { button.textContent = 'Copied'; });
  pre.replaceWith(block);
  block.append(pre, button);
}

// The navigation shows the place of this page. scrollIntoView would scroll the page too.
const nav = document.querySelector('nav');
nav.scrollTop += nav.querySelector('[aria-current]').getBoundingClientRect().top - nav.getBoundingClientRect().top - nav.clientHeight / 2;
