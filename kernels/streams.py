"""Constants of the random streams. Every backend draws the same lists, to the bit, from these.

A draw is a word of Philox 4x32-10 (Salmon et al., SC 2011) with key = seed and counter =
(block, 4 * epoch + stream, id, id >> 32). `reference` has the readable version.

The bits that round factors to bfloat16 have the counter (ROUNDING_BLOCK + group, 4 * step + table, row, 0). A group is
8 factors of a row, each of which takes 16 bits.
"""

ORDER, USER, POSITIVES, NEGATIVES = range(4)  # streams
SHARED_BLOCK = 1 << 31  # first block of the draws that a group of lists shares
ITEM_TABLE, USER_TABLE = range(2)  # tables whose factors are rounded
ROUNDING_BLOCK = 1 << 30  # first block of the bits that round factors; no draw of lists has a block from here to 2^31
FEISTEL_ROUNDS = 8  # with 4, triples of 5 to 7 elements fail a chi-square test for uniformity
