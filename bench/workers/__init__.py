"""The processes of the paired benchmark: each contender is an initiator and a target behind one small
protocol.

They run under the interpreter of the system they measure, so nothing here needs more than numpy.
"""
