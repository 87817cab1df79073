"""The toolbox for programs (jaxprs): one table of primitives, one walk over equations,
and what is asked of programs: slices and axes.

It lies below all rooms, because pure ones (``moments``, ``sgmcmc``) walk programs too.
"""
