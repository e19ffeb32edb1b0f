"""One instance: plan = schedule(); result = run(plan); update(result)."""
