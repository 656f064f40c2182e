"""Word lists of the generated tasks: plain English words, known to every tokenizer."""

from __future__ import annotations

_ADJECTIVES = """
amber bitter brave bright broken calm careful clever cold copper crimson curious distant dusty eager early empty
famous fancy fearless gentle giant golden grand green happy heavy hidden hollow honest humble icy jolly kind large
lively lonely loud lucky merry mighty modern narrow noble odd patient pale plain polite proud purple quick quiet
rapid rare rough royal rusty sacred sharp shiny silent silver simple sleepy slow small smooth solid spicy steady
stormy strange sturdy sunny sweet swift tall tender tiny tough vivid warm wild wise wooden young
"""

_NOUNS = """
anchor apple arrow badger bakery barrel basket beacon beetle blanket bottle bridge bucket button cabin camel candle
canyon carpet castle cedar chapel cherry circle clock cloud compass copper coral cottage crystal desert diamond
dolphin dragon eagle engine falcon feather ferry finger forest fountain garden ginger glacier guitar hammer harbor
hawk helmet island jacket jungle kettle kitchen ladder lantern lemon library lion lizard magnet maple marble meadow
mirror monkey mountain needle ocean orange otter oyster paddle palace panther parrot pebble pencil pepper pillow
pirate planet pocket pumpkin rabbit raven ribbon river rocket saddle salmon scarf shadow shovel spider squirrel
stable statue sugar table temple ticket tiger tower tractor trumpet tunnel turtle valley velvet village violin wagon
walnut whale window winter wizard zebra
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
