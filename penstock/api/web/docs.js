// The server's OpenAPI document, readable.
import "./key.js";
import { el } from "./dom.js";
import { code } from "./markdown.js";
import { get } from "./server.js";

const found = document.getElementById("found");
let named = {};

try {
  const document_ = await get("openapi.json");
  named = document_.components.schemas;
  const operations = Object.entries(document_.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, told]) => ({ path, method, told })));
  found.replaceChildren(...operations.map(operation));
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
} catch (error) {
  found.replaceChildren(el("p.bad", { role: "alert" }, error.message));
}

function operation({ path, method, told }) {
  const body = told.requestBody?.content["application/json"].schema;
  const answers = Object.entries(told.responses);
  const [, good] = answers[0];
  const answer = good.content?.["application/json"]?.schema;
  return el("details.card", { id: `${method} ${path}` },
    el("summary", {}, el("strong", {}, method.toUpperCase()), ` ${path} `, el("span.empty", {}, told.description ?? "")),
    body ? [el("h3", {}, "Body"), fields(body)] : null,
    answer ? [el("h3", {}, "Answer"), fields(answer)] : null,
    el("h3", {}, "Statuses"), el("ul", {}, answers.map(([status, { description }]) => el("li", {}, `${status}: ${description}`))),
    code(example(path, method, body), "shell"));
}

function example(path, method, body) {
  const lines = [`curl ${location.origin}${path}`];
  if (body) {
    const needed = resolve(body).required ?? [];
    const sent = path.includes("chat") ? { messages: [{ role: "user", content: "Hello" }] } : Object.fromEntries(needed.map((name) => [name, "Hello"]));
    lines.push("  -H 'content-type: application/json'", `  -d '${JSON.stringify(sent)}'`);
  } else if (method !== "get") lines[0] += ` -X ${method.toUpperCase()}`;
  return lines.join(" \\\n");
}

function resolve(schema) {
  return schema.$ref ? named[schema.$ref.split("/").pop()] : schema;
}

/** What an object has, one folded row each where it has more below it. */
function fields(schema, depth = 0) {
  const { properties, required = [] } = resolve(schema);
  if (!properties) return el("p", {}, el("code", {}, kind(schema)));
  const shown = Object.entries(properties).filter(([, each]) => each.type !== "null"); // those are refused
  return el("ul", {}, shown.map(([name, each]) => {
    const inner = depth < 4 ? below(each) : null;
    const told = [el("code", {}, name), ` ${kind(each)}${required.includes(name) ? ", needed" : ""}${range(each)} `, el("span.empty", {}, each.description ?? "")];
    return el("li", {}, inner ? el("details", {}, el("summary", {}, told), fields(inner, depth + 1)) : told);
  }));
}

/** The schema of the object that is in it, or in a list of it. */
function below(schema) {
  const held = resolve(schema);
  if (held.properties) return held;
  if (held.items) return below(held.items);
  for (const each of held.anyOf ?? held.oneOf ?? []) {
    const inner = below(each);
    if (inner) return inner;
  }
  return null;
}

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return [...new Set(either.map(kind))].join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items) : "anything"}`;
  return [schema.type ?? "anything"].flat().join(" or ");
}

function range(schema) {
  const parts = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["maxLength", "length ≤"], ["maxItems", "items ≤"]];
  const said = parts.filter(([name]) => schema[name] !== undefined).map(([name, sign]) => `${sign} ${schema[name]}`);
  return said.length ? ` (${said.join(", ")})` : "";
}
