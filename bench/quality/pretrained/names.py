"""Plain words that facts are made of, and names that are no words."""

import numpy as np

PLACES = """
Accra Ankara Athens Baku Bamako Bangkok Beirut Belgrade Berlin Bern Bogota Brussels
Bucharest Budapest Cairo Canberra Caracas Colombo Copenhagen Dakar Damascus Delhi Dhaka Doha
Dublin Hanoi Havana Helsinki Istanbul Jakarta Kabul Kampala Kathmandu Khartoum Kigali
Kingston Kinshasa Lagos Lima Lisbon Ljubljana London Luanda Lusaka Madrid Managua Manila
Maputo Mexico Minsk Montevideo Moscow Nairobi Oslo Ottawa Panama Paris Prague Quito Rabat
Riga Riyadh Rome Santiago Sarajevo Seoul Sofia Stockholm Tallinn Tehran Tirana Tokyo Tripoli
Tunis Vienna Vilnius Warsaw Yerevan Zagreb Zurich
""".split()

WORDS = """
anchor apple arrow basket beacon bottle branch bridge bucket butter button cabin candle
canvas carpet castle cellar cherry circle cloud copper corner cotton cradle crystal curtain
desert diamond dragon drawer eagle engine feather fence flower forest fountain garden ginger
glacier guitar hammer harbor helmet honey island ivory jacket jungle kettle ladder lantern
lemon magnet marble meadow mirror mountain needle ocean olive orange oyster paddle palace
pebble pepper pillow planet pocket pumpkin rabbit ribbon river rocket saddle sailor shadow
silver spider stable summer sunset tablet temple ticket tiger timber tunnel turtle valley
velvet violin walnut window winter
""".split()


def letters(rng: np.random.Generator, count: int) -> list[str]:
    """Different names of five capital letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(chr(65 + i) for i in rng.integers(0, 26, 5))] = None
    return list(found)
