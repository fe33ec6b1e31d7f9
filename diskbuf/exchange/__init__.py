"""Stores to and from files of other programs: tables, arrays, and the data sets of reinforcement learning.

`diskbuf.exchange.exporting.export_store` and `diskbuf.exchange.importing.import_store` are the two ends;
`diskbuf.exchange.formats` has the formats, `diskbuf.exchange.contract` what one of them has to do.
"""
