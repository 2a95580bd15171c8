// The guessing game against an HTTP address: BASE_URL=<base_url of run_agent> node agent.mjs <secret number>
// The base URL gives access to the conversation: other users of the machine can read arguments, but not the environment.
const base = process.env.BASE_URL;
const [secret] = process.argv.slice(2);
const post = async (path, body) => {
  const response = await fetch(base + path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
};
const messages = [{ role: "user", content: "guess" }];
let reward = 0;
for (let guess = 0; guess < 3; guess++) {
  const completion = await post("/v1/chat/completions", { model: "policy", messages, max_tokens: 1 });
  const reply = completion.choices[0].message;
  const number = Number(reply.content);
  if (number === Number(secret)) { reward = 1; break; }
  if (!number) break;
  messages.push(reply, { role: "user", content: Number(secret) > number ? "higher" : "lower" });
}
await post("/reward_info", { reward_info: { reward } });
