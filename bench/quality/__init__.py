"""The quality lab: are the rows that the engine picks the right ones?"""
