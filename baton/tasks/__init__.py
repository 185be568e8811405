"""How asyncio tasks live: work that lasts and begins again, work beside a block, and waits that a cancel doesn't
end.
"""
