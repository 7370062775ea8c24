"""The checks that `llmgw-agent doctor` makes, one subject a module. Pure.

agent/doctor.py lists them. Each is a function of a `Found`: its verdict, or None where it does not
apply to the machine.
"""
