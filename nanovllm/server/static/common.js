// Code for both pages: requests with the API key, reading server-sent events, and the theme.

const KEY = "nanovllm.key";
const THEME = "nanovllm.theme";
const THEMES = ["auto", "light", "dark"];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

export class RequestFailed extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The key is stored for this tab only, until the tab is closed.
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key.trim()),
};

export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  const here = location.origin + location.pathname; // without credentials in the address, which fetch refuses
  const response = await fetch(new URL(path, here), { ...options, headers });
  if (!response.ok) throw new RequestFailed(errorMessage(await response.text(), response.status), response.status);
  return response;
}

function errorMessage(body, status) {
  try {
    return JSON.parse(body).error.message;
  } catch {
    return `The server answered ${status}.`; // the body may be a proxy's error page
  }
}

// Yields the data of each server-sent event. EventSource cannot be used: it can send neither a body nor a key.
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unfinished = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (unfinished + value).split(/\r?\n/);
      unfinished = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // a broken stream cannot be cancelled; its own error is already being thrown
  }
}

export function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

export function isDark() {
  const theme = currentTheme();
  return theme === "auto" ? prefersDark.matches : theme === "dark";
}

export function onThemeChange(callback) {
  prefersDark.addEventListener("change", callback);
  document.addEventListener("themechange", callback);
}

function currentTheme() {
  const theme = localStorage.getItem(THEME);
  return THEMES.includes(theme) ? theme : "auto";
}

function applyTheme() {
  const theme = currentTheme();
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  document.dispatchEvent(new Event("themechange"));
}

document.getElementById("theme").addEventListener("click", () => {
  localStorage.setItem(THEME, THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length]);
  applyTheme();
});
applyTheme();
