"""`penstock up` in front of servers that speak vLLM's API."""

import json

import httpx

from penstock.cli.main import main
from tests.helpers.deployments import UpProcesses
from tests.helpers.vllm import fakes, next_token
from tests.helpers.waiting import eventually


def test_one_endpoint_in_front_of_two_servers_of_which_one_dies_and_comes_back(tmp_path, capsys):
    with fakes(2) as servers:
        for server in servers:
            server.pause = 0.005  # it is to be killed before it has said all, however busy the host is
        names = ["a-0", "b-0"]
        file = tmp_path / "front.yaml"
        groups = [{"name": name[0], "url": server.url} for name, server in zip(names, servers, strict=True)]
        restart = {"backoff": 0.05}
        file.write_text(json.dumps({"model": "demo", "port": 0, "instances": groups, "restart": restart}))
        up = UpProcesses(file, instances=names)
        try:
            prompt, count, tokens, killed = list(range(5, 205)), 600, [], None
            body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True, "return_token_ids": True}
            with httpx.stream("POST", up.urls[0] + "/v1/completions", json=body, timeout=60) as answer:
                request_id = answer.headers["x-request-id"]
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
                    if killed is None and len(tokens) > 20:
                        killed = next(server for server in servers if server.bodies[-1]["max_tokens"] == count)
                        killed.kill()
            expected = list(prompt)
            for _ in range(count):
                expected.append(next_token(expected, 4096))
            assert tokens == expected[len(prompt) :]
            assert main(["explain", request_id, "--url", up.urls[0], "--json"]) == 0
            (sequence,) = json.loads(capsys.readouterr().out)["sequences"]
            assert len(sequence["placements"]) == 2
            assert sequence["placements"][1]["prefill"] != sequence["placements"][0]["prefill"]
            refused = httpx.post(up.urls[0] + "/v1/completions", json={"prompt": "a", "prompt_logprobs": 1}, timeout=30)
            assert refused.status_code == 400
            assert "prompt_logprobs" in refused.json()["error"]["message"]
            killed.again()
            eventually(lambda: up._ready(0) == set(names), 40, up.log)
        finally:
            up.close()
