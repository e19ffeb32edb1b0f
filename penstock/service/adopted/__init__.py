"""A running vLLM server as an instance: engine's messages on one side, vLLM's HTTP API on the other.

vllm.py    that API in shapes: a request's body, a stream's chunks, /metrics
http.py    how it is reached
beliefs.py  what is believed of it: its prefix cache, how fast it is
server.py  the engine's side
start.py   from a URL to what an engine says when it is ready
"""
