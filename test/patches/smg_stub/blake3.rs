//! BLAKE3 of at most one chunk (1,024 bytes), enough for ring positions.
//!
//! Stands in for the crate of that name where there is no crate registry; the
//! shared vectors, made with the real library, prove it right.

const IV: [u32; 8] = [
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
];
const PERMUTATION: [usize; 16] = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
const ROUND: [[usize; 4]; 8] = [
    [0, 4, 8, 12],
    [1, 5, 9, 13],
    [2, 6, 10, 14],
    [3, 7, 11, 15],
    [0, 5, 10, 15],
    [1, 6, 11, 12],
    [2, 7, 8, 13],
    [3, 4, 9, 14],
];
const CHUNK_START: u32 = 1;
const CHUNK_END: u32 = 2;
const ROOT: u32 = 8;

pub struct Hash([u8; 32]);

impl Hash {
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

pub fn hash(input: &[u8]) -> Hash {
    assert!(input.len() <= 1024, "one chunk only");
    let blocks: Vec<&[u8]> = match input.len() {
        0 => vec![input],
        _ => input.chunks(64).collect(),
    };
    let mut chaining = IV;
    for (number, block) in blocks.iter().enumerate() {
        let mut flags = 0;
        if number == 0 {
            flags |= CHUNK_START;
        }
        if number + 1 == blocks.len() {
            flags |= CHUNK_END | ROOT;
        }
        chaining = compress(&chaining, block, flags);
    }
    let mut out = [0; 32];
    for (bytes, word) in out.chunks_mut(4).zip(chaining) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    Hash(out)
}

fn compress(chaining: &[u32; 8], block: &[u8], flags: u32) -> [u32; 8] {
    let mut padded = [0u8; 64];
    padded[..block.len()].copy_from_slice(block);
    let mut message = [0u32; 16];
    for (word, bytes) in message.iter_mut().zip(padded.chunks(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    let mut state = [0u32; 16];
    state[..8].copy_from_slice(chaining);
    state[8..12].copy_from_slice(&IV[..4]);
    state[14] = block.len() as u32;
    state[15] = flags;
    for _ in 0..7 {
        for (number, places) in ROUND.iter().enumerate() {
            mix(
                &mut state,
                places,
                message[2 * number],
                message[2 * number + 1],
            );
        }
        message = PERMUTATION.map(|from| message[from]);
    }
    std::array::from_fn(|i| state[i] ^ state[i + 8])
}

fn mix(state: &mut [u32; 16], places: &[usize; 4], first: u32, second: u32) {
    let [a, b, c, d] = *places;
    for (word, turn_d, turn_b) in [(first, 16, 12), (second, 8, 7)] {
        state[a] = state[a].wrapping_add(state[b]).wrapping_add(word);
        state[d] = (state[d] ^ state[a]).rotate_right(turn_d);
        state[c] = state[c].wrapping_add(state[d]);
        state[b] = (state[b] ^ state[c]).rotate_right(turn_b);
    }
}
