import pytest

from retrail.data_prep.sentences import first_sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One two.  Three.", "One two."),
        ("v1.2 is out\nnow", "v1.2 is out now"),
        ("George W. Bush is a man. He", "George W. Bush is a man."),
        ("St. Louis is a city. It", "St. Louis is a city."),
        ("Roe vs. Wade (see Dr. No) was long. It", "Roe vs. Wade (see Dr. No) was long."),
        ("He went, e.g. north. Then", "He went, e.g. north."),
        ("In the U.S. Army he rose! Then", "In the U.S. Army he rose!"),
        ("1. Pages about taxes. More", "1. Pages about taxes."),
        ('He said "no." Then he left.', 'He said "no."'),
        ("Yes? no, that was one. Two", "Yes? no, that was one."),
        ("It rose in 1999. Then it fell.", "It rose in 1999."),
        ("東京は首都です。人口は多い。", "東京は首都です。"),
        ("The best. ", "The best."),
        ("... and so on. Then", "... and so on."),
        ("Their guest. Next", "Their guest."),
        ("Symphony No. 5 is long. It", "Symphony No. 5 is long."),
        ("  ", ""),
    ],
)
def test_first_sentence(text, sentence):
    assert first_sentence(text) == sentence
