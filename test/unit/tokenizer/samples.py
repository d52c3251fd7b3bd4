"""Texts to train small tokenizers on, and texts to compare tokenizers with."""

from __future__ import annotations

import random

_LINES = [
    "The quick brown fox jumps over the lazy dog, and then it doesn't; they'll see.",
    "def tokenize(self, text: str) -> list[int]:\n    return [self.table[c] for c in text if c != '\\n']",
    "for (int i = 0; i < 128; ++i) { sum += values[i] * 2.5e-3; }  // camelCase getHTTPResponse",
    "Il était une fois une naïve élève à l'école; ça coûte 12,50 €.",
    "中文字符和日本語のテキスト、ひらがなとカタカナ。한국어 문장도 있습니다.",
    "Привет, мир! Это проверка 2024 года. Καλημέρα κόσμε.",
    "مرحبا بالعالم ١٢٣ שלום עולם",
    '<div class="box">\t<p>Hello &amp; goodbye</p>\r\n</div>',
    "    indented by four\n        by eight\n\n\n    and back",
    "100 200 300 1000 123456 0x1F 3.14159 1,000,000",
]


def corpus() -> list[str]:
    """A few thousand lines, always the same."""
    rng = random.Random(0)
    words = [word for line in _LINES for word in line.split(" ")]
    lines = [" ".join(rng.choices(words, k=rng.randint(2, 12))) for _ in range(1500)]
    return [*_LINES * 20, *lines]


TEXTS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "  a  b   c    d     ",
    "\n",
    "\n\n\n",
    "a\n\n\nb\n",
    "\t\tx\t y\r\nz\r\r\n",
    " \n \n\t\n ",
    "The quick brown fox",
    "I'm sure they'll say WE'VE said it'd n't 'tis",
    "getHTTPResponseCode XMLHttpRequest iPhone ABCdef ÉcoleNormale ǅungla",
    "1 12 123 1234 12345 1234567890 3.14 1,000 0x1F 1e-9",
    "½ ² ³ ٣٤٥ १२३ Ⅻ ⑳",
    "a1b22c333 x² y₃",
    "def f(x):\n\treturn x**2  # naïve\n\n\nclass A:\n    pass\n",
    "if (a && b || !c) { return --i; } /* ... */ //",
    '{"key": [1, 2, {"x": null}], "s": "\\u00e9\\n"}',
    "<html>\n  <body a='b'>&nbsp;</body>\n</html>",
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x%';",
    "中文字符，日本語のテキスト、한국어 문장",
    "中文123English混合 テキスト 42 個",
    "龥龦\u4e00\u3400\U00020000 ｆｕｌｌ　ｗｉｄｔｈ １２３ ！？",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 🤖 ❤️ 🏳️‍🌈",
    "🤖🤖🤖a🤖 b🤖",
    "e\u0301 e\u0301e\u0301 \u00e9 a\u0308o\u0302\u0323 \u0301 x\u0301\u0301\u0301",
    "नमस्ते दुनिया ภาษาไทย বাংলা தமிழ்",
    "مرحبا بالعالم שלום עולם \u202eabc\u202c",
    "Привет, мир! Ελληνικά ԱԲԳ აბგ ᲐᲑᲒ Ꭰꭰ ꙀꙁＡａ 𐐀𐐨",
    "\x00 \x01\x02 \x07 \x1b[31m \x7f \x85 \xa0 \xad",
    "\u2028 \u2029 \u200b \ufeff \u3000 \u2003 end",
    "\ufffd \ufffe \U0010ffff \ue000",
    "_underscore__double___ snake_case-kebab.dot/slash\\back",
    "....  ,,,, !!!! ???? ---- ==== ____ //// \n////\n",
    "“quotes” ‘single’ – — … • § ¶ † ™ © € £ ¥ +1 -1 ±1 ×÷ ≤ ∞",
    "http://example.org/a/b?c=d&e=f#g user@example.com",
    "word" * 100,
    "x" * 300,
    " " * 100,
    "ab" * 20 + " " + "aaa" * 15,
    "Pneumonoultramicroscopicsilicovolcanoconiosis" * 4,
    "<0x41> <0x0A> <|end|> [INST] ▁ ▁▁ a▁b Ġ Ċ",
    "Don't\u2019t can\u2019t 'S 'LL 'Re",
]


def texts() -> list[str]:
    """`TEXTS`, these between spaces and newlines, and random mixtures; a few hundred, always the same."""
    rng = random.Random(1)
    around = [
        f"{before}{text[:80]}{after}" for text in TEXTS for before, after in ((" ", "\n"), ("\n", "  "), ("x", "9"))
    ]
    pieces = [word for text in TEXTS for word in text.split(" ") if len(word) < 40]
    mixed = ["".join(rng.choices([*pieces, " ", "  ", "\n", "\t"], k=rng.randint(1, 15))) for _ in range(200)]
    return [*TEXTS, *around, *mixed]
