"""A local GitHub for runners: GitHub's REST, a job queue, and a stand-in for the actions runner.

`core` is a synchronous state machine that knows neither network nor clock; the HTTP layer around it is thin.
"""
