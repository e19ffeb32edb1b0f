from textwrap import dedent

import pytest


@pytest.fixture
def scenario(tmp_path):
    """A file, beside its trace of 120 requests in six seconds."""
    rows = [f"{i * 0.05:.2f},300,{5 + i % 40}" for i in range(120)]
    (tmp_path / "small.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    file = tmp_path / "scenario.yaml"
    file.write_text(
        dedent("""
        workload: {trace: small.csv}
        slo: {ttft-ms: 100, tpot-ms: 20}
        engine: {max-model-len: 2048, max-num-seqs: 16}
        instances: [{count: 2}]
        layouts: {split: [{role: prefill}, {role: decode}]}
        """)
    )
    return file
