//! Decoder of x86-64 instructions that store to a doorbell page: their length and the stored value.
//!
//! Source: Intel SDM volume 2. It knows the stores that compilers and drivers use for registers: `mov`,
//! `movnti`, and moves of vector registers in SSE and AVX encoding. Other instructions are left to the
//! program's own fault handling.

/// Maximum length of an instruction in bytes.
pub const LONGEST: usize = 15;

/// Register contents at the time of the fault.
#[derive(Clone, Copy, Debug)]
pub struct Registers {
    /// General registers in the order of their numbers: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15.
    pub general: [u64; 16],
    /// Lower 32 bytes of the vector registers 0 to 15.
    pub vector: [[u8; 32]; 16],
}

/// A decoded store instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// Length of the instruction in bytes.
    pub length: usize,
    /// Number of bytes stored.
    pub size: usize,
    /// Stored value; the first `size` bytes are valid.
    pub bytes: [u8; 32],
}

/// Source operand of a store.
enum Source {
    General,
    /// Bits 8 to 15 of one of the first four registers (ah, ch, dh, bh).
    Byte,
    Vector,
    /// Bytes 8 to 15 of a vector register.
    UpperHalf,
    Immediate,
}

/// Decodes the instruction at the start of `code`. Returns `None` if it is truncated or not a known store.
pub fn decode(code: &[u8], registers: &Registers) -> Option<Decoded> {
    let (mut at, mut operand16, mut repeat) = legacy_prefixes(code)?;
    let mut wide = false;
    let mut reg_high = 0;
    let mut has_rex = false;
    let mut vex256 = false;
    let (map, opcode) = match *code.get(at)? {
        0xc5 => {
            let byte = *code.get(at + 1)?;
            (reg_high, vex256) = (if byte & 0x80 == 0 { 8 } else { 0 }, byte & 4 != 0);
            (operand16, repeat) = vex_prefix(byte);
            at += 2;
            (1, *code.get(at)?)
        }
        0xc4 => {
            let (first, second) = (*code.get(at + 1)?, *code.get(at + 2)?);
            (reg_high, wide, vex256) = (if first & 0x80 == 0 { 8 } else { 0 }, second & 0x80 != 0, second & 4 != 0);
            (operand16, repeat) = vex_prefix(second);
            at += 3;
            (first & 0x1f, *code.get(at)?)
        }
        byte => {
            if byte & 0xf0 == 0x40 {
                (wide, reg_high, has_rex) = (byte & 8 != 0, (byte & 4) << 1, true);
                at += 1;
            }
            match *code.get(at)? {
                0x0f => {
                    at += 1;
                    (1, *code.get(at)?)
                }
                opcode => (0, opcode),
            }
        }
    };
    at += 1;
    let plain = operand_size(wide, operand16);
    let vector = if vex256 { 32 } else { 16 };
    let (size, source) = match (map, opcode, operand16, repeat) {
        (0, 0x88, ..) => (1, Source::Byte),
        (0, 0x89, ..) => (plain, Source::General),
        (0, 0xc6, ..) => (1, Source::Immediate),
        (0, 0xc7, ..) => (plain, Source::Immediate),
        (1, 0xc3, false, 0) => (plain, Source::General),    // movnti
        (1, 0x11, _, 0) => (vector, Source::Vector),        // movups, movupd
        (1, 0x11, _, 0xf3) => (4, Source::Vector),          // movss
        (1, 0x11, _, 0xf2) => (8, Source::Vector),          // movsd
        (1, 0x13, _, 0) => (8, Source::Vector),             // movlps, movlpd
        (1, 0x17, _, 0) => (8, Source::UpperHalf),          // movhps, movhpd
        (1, 0x29 | 0x2b, _, 0) => (vector, Source::Vector), // movaps, movntps
        (1, 0x7e, true, 0) => (if wide { 8 } else { 4 }, Source::Vector), // movd, movq
        (1, 0x7f, true, 0) | (1, 0x7f, false, 0xf3) => (vector, Source::Vector), // movdqa, movdqu
        (1, 0xe7, true, 0) => (vector, Source::Vector),     // movntdq
        (1, 0xd6, true, 0) => (8, Source::Vector),          // movq
        _ => return None,
    };
    let (field, mut at) = memory_operand(code, at)?;
    let reg = field | reg_high;
    let mut bytes = [0; 32];
    match source {
        Source::General => bytes[..8].copy_from_slice(&registers.general[usize::from(reg)].to_le_bytes()),
        Source::Byte if !has_rex && (4..8).contains(&reg) => {
            bytes[0] = (registers.general[usize::from(reg - 4)] >> 8) as u8;
        }
        Source::Byte => bytes[0] = registers.general[usize::from(reg)] as u8,
        Source::Vector => bytes = registers.vector[usize::from(reg)],
        Source::UpperHalf => bytes[..8].copy_from_slice(&registers.vector[usize::from(reg)][8..16]),
        Source::Immediate => {
            if field != 0 {
                return None;
            }
            let width = size.min(4);
            let immediate = code.get(at..at + width)?;
            at += width;
            // A 32-bit immediate is sign-extended.
            let fill = if size == 8 && immediate[3] & 0x80 != 0 { 0xff } else { 0 };
            bytes[..8].fill(fill);
            bytes[..width].copy_from_slice(immediate);
        }
    }
    (at <= code.len()).then_some(Decoded { length: at, size, bytes })
}

/// Reads the legacy prefixes; returns their end, whether one of them makes operands 16 bits long, and the last `repne`
/// or `rep`, or 0. `None` if the code is truncated.
pub(crate) fn legacy_prefixes(code: &[u8]) -> Option<(usize, bool, u8)> {
    let (mut at, mut operand16, mut repeat) = (0, false, 0);
    loop {
        match *code.get(at)? {
            0x66 => operand16 = true,
            byte @ (0xf2 | 0xf3) => repeat = byte,
            0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0x67 => {}
            _ => return Some((at, operand16, repeat)),
        }
        at += 1;
    }
}

/// Returns the bytes of a general operand. `wide`: REX.W is set.
pub(crate) fn operand_size(wide: bool, operand16: bool) -> usize {
    match (wide, operand16) {
        (true, _) => 8,
        (false, true) => 2,
        (false, false) => 4,
    }
}

/// Reads the ModRM byte at `at`; returns its register field and the end of the operand. `None` if the code is truncated
/// or the operand is a register.
pub(crate) fn memory_operand(code: &[u8], mut at: usize) -> Option<(u8, usize)> {
    let modrm = *code.get(at)?;
    at += 1;
    let (mode, base) = (modrm >> 6, modrm & 7);
    if mode == 3 {
        return None;
    }
    let mut displacement = match mode {
        1 => 1,
        2 => 4,
        _ => 0,
    };
    if base == 4 {
        let sib = *code.get(at)?;
        at += 1;
        if mode == 0 && sib & 7 == 5 {
            displacement = 4;
        }
    } else if mode == 0 && base == 5 {
        displacement = 4; // relative to the instruction pointer
    }
    Some((modrm >> 3 & 7, at + displacement))
}

fn vex_prefix(byte: u8) -> (bool, u8) {
    match byte & 3 {
        1 => (true, 0),
        2 => (false, 0xf3),
        3 => (false, 0xf2),
        _ => (false, 0),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::Command;

    use super::*;
    use wirepath_testlab::{Requirement, require};

    fn registers() -> Registers {
        let mut registers = Registers { general: [0; 16], vector: [[0; 32]; 16] };
        for (i, value) in registers.general.iter_mut().enumerate() {
            *value = 0x1122_3344_5566_7700 + i as u64;
        }
        for (i, value) in registers.vector.iter_mut().enumerate() {
            *value = std::array::from_fn(|byte| (16 * i + byte) as u8);
        }
        registers
    }

    /// Returns the code of an instruction in AT&T syntax.
    pub(crate) fn assemble(instruction: &str) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("a.s"), format!("{instruction}\n")).unwrap();
        let run = |program: &str, arguments: &[String]| {
            assert!(Command::new(program).args(arguments).status().unwrap().success(), "{instruction}");
        };
        run("as", &[path("a.s"), "-o".into(), path("a.o")]);
        run("objcopy", &["-O".into(), "binary".into(), "-j".into(), ".text".into(), path("a.o"), path("a.bin")]);
        std::fs::read(path("a.bin")).unwrap()
    }

    /// Checks each instruction, as the assembler encodes it, against the bytes that it stores.
    #[test]
    fn stores_as_the_assembler_writes_them() {
        require!(Requirement::Program("as"), Requirement::Program("objcopy"));
        let general = |i: u64| (0x1122_3344_5566_7700 + i).to_le_bytes().to_vec();
        let vector = |i: usize, range: std::ops::Range<usize>| registers().vector[i][range].to_vec();
        let cases: Vec<(&str, Vec<u8>)> = vec![
            ("mov %rax, (%rdi)", general(0)),
            ("mov %r11, 0x400(%r13)", general(11)),
            ("mov %rdx, 0x800(%rsp,%rcx,8)", general(2)),
            ("mov %rsi, 0x10(%rip)", general(6)),
            ("mov %ecx, (%rbx)", general(1)[..4].to_vec()),
            ("mov %r9d, 0x410(,%rax,1)", general(9)[..4].to_vec()),
            ("mov %dx, 4(%rbp)", general(2)[..2].to_vec()),
            ("mov %ah, (%rdi)", vec![0x77]),
            ("mov %sil, (%rdi)", vec![6]),
            ("movq $-2, 0x12345(%r12)", (-2i64).to_le_bytes().to_vec()),
            ("movl $0x80000001, (%rdi)", 0x8000_0001u32.to_le_bytes().to_vec()),
            ("movw $7, (%rdi)", vec![7, 0]),
            ("movb $9, (%rdi)", vec![9]),
            ("movnti %r8, (%r14)", general(8)),
            ("movnti %edi, (%rax)", general(7)[..4].to_vec()),
            ("movq %xmm3, (%rdi)", vector(3, 0..8)),
            ("movq %xmm12, 0x400(%rdi)", vector(12, 0..8)),
            ("movd %xmm1, (%rdi)", vector(1, 0..4)),
            ("movsd %xmm2, (%rdi)", vector(2, 0..8)),
            ("movlps %xmm2, (%rdi)", vector(2, 0..8)),
            ("movhps %xmm2, (%rdi)", vector(2, 8..16)),
            ("movups %xmm9, (%rdi)", vector(9, 0..16)),
            ("movdqa %xmm4, 64(%rdi)", vector(4, 0..16)),
            ("movdqu %xmm4, 64(%rdi)", vector(4, 0..16)),
            ("movntdq %xmm15, (%rdi)", vector(15, 0..16)),
            ("movntps %xmm5, (%rdi)", vector(5, 0..16)),
            ("vmovq %xmm10, (%rdi)", vector(10, 0..8)),
            ("vmovdqu %ymm6, (%r15)", vector(6, 0..32)),
            ("vmovntdq %ymm11, 32(%rdi)", vector(11, 0..32)),
            ("vmovaps %ymm1, (%r8,%r9,2)", vector(1, 0..32)),
            ("vmovups %xmm7, (%rdi)", vector(7, 0..16)),
        ];
        for (instruction, stored) in cases {
            let mut code = assemble(instruction);
            let length = code.len();
            for cut in 0..length {
                assert_eq!(decode(&code[..cut], &registers()), None, "{instruction}, {cut} bytes of it");
            }
            code.extend([0x90; 15]);
            let decoded = decode(&code, &registers()).unwrap_or_else(|| panic!("{instruction}: {code:02x?}"));
            assert_eq!((decoded.length, decoded.bytes[..decoded.size].to_vec()), (length, stored), "{instruction}");
        }
    }

    #[test]
    fn other_instructions_are_not_decoded() {
        let nothing: [&[u8]; 5] = [
            &[0x48, 0x8b, 0x07],       // mov (%rdi), %rax
            &[0x48, 0x89, 0xc7],       // mov %rax, %rdi
            &[0xc7, 0x08, 1, 2, 3, 4], // C7 /1
            &[0x90],
            &[0x66; 15],
        ];
        for code in nothing {
            assert_eq!(decode(code, &registers()), None, "{code:02x?}");
        }
    }
}
