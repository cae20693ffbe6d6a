// The texts of the page in the browser's language; what runs print stays as it is.
const PATTERNS = Object.keys(CHINESE).filter(text => text.includes("{}")).sort((one, other) => other.length - one.length)
  .map(text => [new RegExp("^" + text.replace(/[.*+?^$()|[\]\\]/g, "\\$&").replaceAll("{}", "(.+?)") + "$"), CHINESE[text]]);

function inChinese(text) {
  if (Object.hasOwn(CHINESE, text)) return CHINESE[text];
  for (const [pattern, meant] of PATTERNS) {
    const found = pattern.exec(text);
    if (found) return found.slice(1).reduce((said, part) => said.replace("{}", () => inChinese(part)), meant);
  }
  return text;
}

function translate(root) {
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT,
    node => node.parentElement.closest("pre, script, style") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  for (let node = root.nodeType === Node.TEXT_NODE ? root : texts.nextNode(); node; node = texts.nextNode()) {
    const text = node.data.trim();
    if (text && !node.parentElement.closest("pre, script, style")) node.data = node.data.replace(text, () => inChinese(text));
  }
  if (root.querySelectorAll) for (const field of root.querySelectorAll("[placeholder]"))
    field.placeholder = inChinese(field.placeholder);
}

if (navigator.language.startsWith("zh")) {
  document.documentElement.lang = "zh-CN";
  new MutationObserver(changes => {
    for (const change of changes) change.addedNodes.forEach(translate);
  }).observe(document, { childList: true, subtree: true });
  translate(document);
}
