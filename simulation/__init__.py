"""Simulation of the control plane and its agents in virtual time, under injected faults, with every invariant checked.

One seed gives one history: scheduling, faults and user actions all follow from it.
"""
