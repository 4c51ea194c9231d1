"""Chaos: faults drawn from a seed, against live traffic, and a look at everything afterwards.

    make chaos SEEDS=200        schedules 0 to 199, and a table of what was survived
    make chaos SEED=123         one schedule again: the same draws; times may vary

plan.py draws a schedule, schedule.py runs it: side.py and its subclasses make the traffic, faults.py strikes, ledger.py
judges how each request and call ended, leftovers.py looks at what is left behind.
"""
