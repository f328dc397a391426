"""Constants of the random streams. Every backend draws the same lists, to the bit, from these.

A draw is a word of Philox 4x32-10 (Salmon et al., SC 2011) with key = seed and counter =
(block, 4 * epoch + stream, id, id >> 32). `reference` has the readable version.
"""

ORDER, USER, POSITIVES, NEGATIVES = range(4)  # streams
SHARED_BLOCK = 1 << 31  # first block of the draws that a group of lists shares
FEISTEL_ROUNDS = 8  # with 4, triples of 5 to 7 elements fail a chi-square test for uniformity
