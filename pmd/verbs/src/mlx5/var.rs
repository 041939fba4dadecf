// UNSAFETY: calls libmlx5.
#![allow(unsafe_code)]

//! VAR: pages of virtio doorbells (mlx5dv_alloc_var(3)), and their export to other processes.
//!
//! The types enforce the rules of the manual. A [`Var`] owns the kernel object and frees it. An [`ImportedVar`] is
//! created in another process from [`Var::export`], on an imported device ([`crate::Verbs::import_device`]). It can
//! be mapped, and dropping it unimports it. After the owner frees the VAR, the importer's next
//! [`ImportedVar::registers`] fails. The library does not check this, so the export includes a [`Liveness`] page.
//!
//! rdma-core has `mlx5dv_var_export`, `_import` and `_unimport` since release 63, and allocation since 28.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rdma_core_sys::MissingSymbol;
use rdma_core_sys::mlx5dv::*;
use wirepath_memory::DeviceMemory;

use super::{Mlx5, PAGE_BYTES};
use crate::{Error, Liveness, LivenessView, Result, registers};

const OBJECT: &str = "the exported VAR";
/// Magic number and format version at the start of exported bytes.
const MAGIC: [u8; 8] = *b"WPVAR\0\0\x01";
/// Bytes of the header before the library's attributes.
const EXPORT_HEADER_BYTES: usize = 48;
/// Maximum bytes of the library's attributes.
const MAX_ATTRIBUTE_BYTES: usize = 256;
/// Maximum bytes of a page that is mapped.
const MAX_VAR_BYTES: u32 = 1 << 20;

/// Kind of a VAR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VarKind {
    /// Doorbells of virtio queues.
    #[default]
    Virtio,
    /// Doorbells as PCIe transaction-layer packets (`MLX5DV_VAR_ALLOC_FLAG_TLP`, rdma-core 65).
    Tlp,
}

/// VAR that this process owns.
#[derive(Debug)]
pub struct Var {
    raw: NonNull<mlx5dv_var>,
    mlx5: Mlx5,
    liveness: Liveness,
}

// SAFETY: `raw` is an owned pointer, and libmlx5 does not change the structure after its creation.
unsafe impl Send for Var {}
// SAFETY: libmlx5 does not change the structure after its creation.
unsafe impl Sync for Var {}

/// Mapping of a VAR, from the library's structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VarMapping {
    page_id: u32,
    bytes: u32,
    offset: libc::off_t,
}

impl VarMapping {
    fn from_raw(raw: NonNull<mlx5dv_var>) -> Self {
        // SAFETY: the VAR is alive, and libmlx5 does not change the structure after its creation.
        let var = unsafe { raw.as_ref() };
        Self { page_id: var.page_id, bytes: var.length, offset: var.mmap_off }
    }

    /// Returns the reason why it cannot be mapped, if any.
    fn problem(self) -> Option<String> {
        let page = PAGE_BYTES as u32;
        let valid = self.bytes.is_multiple_of(page)
            && (page..=MAX_VAR_BYTES).contains(&self.bytes)
            && self.offset >= 0
            && self.offset % PAGE_BYTES as libc::off_t == 0;
        (!valid).then(|| format!("{} bytes at offset {:#x} of the device cannot be mapped", self.bytes, self.offset))
    }

    fn map(self, mlx5: &Mlx5) -> Result<DeviceMemory> {
        if let Some(problem) = self.problem() {
            return Err(mlx5.inner().invalid_answer("mlx5dv_alloc_var", problem));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        registers::map(mlx5.context.cmd_fd(), self.offset, self.bytes as usize, protection)
    }
}

/// Exported VAR for another process: bytes, and a file descriptor to send with them (`SCM_RIGHTS`).
#[derive(Debug)]
pub struct ExportedVar<'v> {
    /// Input of [`ImportedVar::new`] in a process with the same release of libmlx5.
    pub bytes: Vec<u8>,
    /// File descriptor of the liveness page.
    pub liveness: BorrowedFd<'v>,
}

impl Mlx5 {
    /// Checks that the loaded libmlx5 can export and import VARs.
    ///
    /// # Errors
    /// A function is missing. The error contains its name, the loaded release and the required release.
    pub fn check_var_export_support(&self) -> Result<()> {
        let library = self.library()?;
        let missing: [std::result::Result<(), MissingSymbol>; 4] = [
            library._mlx5dv_get_export_sizes().map(drop),
            library.mlx5dv_var_export().map(drop),
            library.mlx5dv_var_import().map(drop),
            library.mlx5dv_var_unimport().map(drop),
        ];
        missing.into_iter().collect::<std::result::Result<(), _>>().map_err(Error::from)
    }

    /// Returns the bytes of the attributes that this release exports.
    fn attribute_bytes(&self) -> Result<usize> {
        let sizes_of = self.library()?._mlx5dv_get_export_sizes()?;
        let mut sizes = mlx5dv_export_sizes::zeroed();
        // SAFETY: `sizes` is valid for writes of the given size.
        unsafe { sizes_of(&raw mut sizes, size_of::<mlx5dv_export_sizes>()) };
        match sizes.var_attrs_size as usize {
            bytes @ 1..=MAX_ATTRIBUTE_BYTES => Ok(bytes),
            bytes => Err(self
                .inner()
                .invalid_answer("mlx5dv_get_export_sizes", format!("{bytes} bytes of attributes for a VAR"))),
        }
    }

    /// Returns the release of the loaded library, or 0 if it is unknown.
    fn release(&self) -> Result<u32> {
        Ok(self.library()?.library().version.map_or(0, |version| version.major))
    }
}

impl Var {
    /// Allocates a VAR.
    ///
    /// # Errors
    /// The device does not support VARs (`EOPNOTSUPP`), or has no more (`ENOSPC`).
    pub fn new(mlx5: &Mlx5, kind: VarKind) -> Result<Self> {
        let library = mlx5.library()?;
        let alloc = library.mlx5dv_alloc_var()?;
        library.mlx5dv_free_var()?;
        let liveness = Liveness::new()?;
        let flags = u32::from(kind == VarKind::Tlp);
        // SAFETY: the context is open and belongs to libmlx5.
        let raw = unsafe { alloc(mlx5.inner().raw.as_ptr(), flags) };
        let raw = mlx5.inner().check_created("mlx5dv_alloc_var", raw, None)?;
        Ok(Self { raw, mlx5: mlx5.clone(), liveness })
    }

    /// Returns the page ID for firmware commands.
    pub fn page_id(&self) -> u32 {
        VarMapping::from_raw(self.raw).page_id
    }

    /// Maps the page.
    ///
    /// # Errors
    /// The kernel cannot map the page.
    pub fn registers(&self) -> Result<DeviceMemory> {
        VarMapping::from_raw(self.raw).map(&self.mlx5)
    }

    /// Exports the VAR. Another process that also has the device file can map the page. This process remains the owner.
    ///
    /// # Errors
    /// libmlx5 is older than release 63, or the export failed.
    pub fn export(&self) -> Result<ExportedVar<'_>> {
        let export = self.mlx5.library()?.mlx5dv_var_export()?;
        let mapping = VarMapping::from_raw(self.raw);
        let mut attributes = vec![0u64; self.mlx5.attribute_bytes()?.div_ceil(8)];
        // SAFETY: the VAR is alive, and `attributes` has room for the number of bytes that the library writes.
        let result = unsafe { export(self.raw.as_ptr(), attributes.as_mut_ptr().cast()) };
        self.mlx5.inner().check("mlx5dv_var_export", result)?;
        let attributes: Vec<u8> = attributes.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let attributes = &attributes[..self.mlx5.attribute_bytes()?];
        let head = ExportHeader {
            release: self.mlx5.release()?,
            attributes: attributes.len() as u32,
            mapping,
            liveness: self.liveness.name(),
        };
        Ok(ExportedVar { bytes: [head.to_bytes().as_slice(), attributes].concat(), liveness: self.liveness.file() })
    }
}

impl Drop for Var {
    fn drop(&mut self) {
        // The liveness page is marked first, so that importers that check it later do not use the VAR.
        self.liveness.end();
        if let Ok(free) = self.mlx5.library().and_then(|library| Ok(library.mlx5dv_free_var()?)) {
            // SAFETY: the VAR is alive and is freed once.
            unsafe { free(self.raw.as_ptr()) };
        }
    }
}

/// Header before the library's attributes, which have neither a magic number nor a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExportHeader {
    /// rdma-core release that wrote the attributes.
    release: u32,
    /// Bytes of the attributes.
    attributes: u32,
    mapping: VarMapping,
    liveness: [u8; 16],
}

impl ExportHeader {
    fn to_bytes(self) -> [u8; EXPORT_HEADER_BYTES] {
        let mut bytes = [0; EXPORT_HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.release.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.attributes.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.mapping.page_id.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.mapping.bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.mapping.offset.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.liveness);
        bytes
    }

    /// Splits exported bytes into header and attributes, and checks the header.
    fn split(bytes: &[u8]) -> Result<(Self, &[u8])> {
        let invalid = |problem: &str| Error::InvalidImport { what: OBJECT, problem: problem.to_owned() };
        let Some((head, attributes)) = bytes.split_first_chunk::<EXPORT_HEADER_BYTES>() else {
            return Err(invalid("it is too short"));
        };
        if head[..5] != MAGIC[..5] {
            return Err(invalid("its magic number is wrong"));
        }
        if head[..8] != MAGIC {
            return Err(invalid(&format!("its version is {}, and this program reads {}", head[7], MAGIC[7])));
        }
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap_or_default());
        let offset = libc::off_t::from_le_bytes(head[24..32].try_into().unwrap_or_default());
        let mapping = VarMapping { page_id: word(16), bytes: word(20), offset };
        let liveness = head[32..].try_into().unwrap_or_default();
        let head = Self { release: word(8), attributes: word(12), mapping, liveness };
        if head.attributes as usize != attributes.len() || attributes.len() > MAX_ATTRIBUTE_BYTES {
            return Err(invalid(&format!(
                "{} bytes of attributes follow, but the header says {}",
                attributes.len(),
                head.attributes
            )));
        }
        if let Some(problem) = mapping.problem() {
            return Err(invalid(&problem));
        }
        Ok((head, attributes))
    }
}

/// VAR that another process owns.
#[derive(Debug)]
pub struct ImportedVar {
    raw: NonNull<mlx5dv_var>,
    mlx5: Mlx5,
    liveness: LivenessView,
    mapped: Option<DeviceMemory>,
}

// SAFETY: `raw` is an owned pointer, and libmlx5 does not change the structure after its creation.
unsafe impl Send for ImportedVar {}
// SAFETY: libmlx5 does not change the structure after its creation.
unsafe impl Sync for ImportedVar {}

impl ImportedVar {
    /// Imports the result of [`Var::export`] of another process, on the device that it passed. This does not map the
    /// page.
    ///
    /// # Errors
    /// libmlx5 is older than release 63 or of another release than the owner's. Or the bytes are not an exported VAR,
    /// do not belong to the liveness page, or the owner has freed the VAR.
    pub fn new(mlx5: &Mlx5, bytes: &[u8], liveness: &OwnedFd) -> Result<Self> {
        mlx5.check_var_export_support()?;
        let import = mlx5.library()?.mlx5dv_var_import()?;
        let (head, attributes) = ExportHeader::split(bytes)?;
        let invalid = |problem: String| Error::InvalidImport { what: OBJECT, problem };
        let release = mlx5.release()?;
        if head.release != release {
            let problem = format!("libmlx5 {} exported it, and this process has libmlx5 {release}", head.release);
            return Err(invalid(problem));
        }
        let expected = mlx5.attribute_bytes()?;
        if attributes.len() != expected {
            return Err(invalid(format!("{} bytes of attributes; libmlx5 reads {expected}", attributes.len())));
        }
        let liveness = LivenessView::map(liveness, head.liveness)?;
        if !liveness.is_live() {
            return Err(Error::FreedByOwner { what: OBJECT });
        }
        // The library reads an aligned structure.
        let mut aligned = vec![0u64; expected.div_ceil(8)];
        for (word, bytes) in aligned.iter_mut().zip(attributes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        // SAFETY: the context is open and belongs to libmlx5. `aligned` contains as many bytes as the library reads.
        // It copies them without a kernel call.
        let raw = unsafe { import(mlx5.inner().raw.as_ptr(), aligned.as_mut_ptr().cast()) };
        let raw = mlx5.inner().check_created("mlx5dv_var_import", raw, None)?;
        let var = Self { raw, mlx5: mlx5.clone(), liveness, mapped: None };
        if VarMapping::from_raw(raw) != head.mapping {
            return Err(invalid("its attributes and its header describe different pages".to_owned()));
        }
        Ok(var)
    }

    /// Returns the page ID for firmware commands.
    pub fn page_id(&self) -> u32 {
        VarMapping::from_raw(self.raw).page_id
    }

    /// Returns the page. The first call maps it.
    ///
    /// # Errors
    /// The owner has freed the VAR ([`Error::FreedByOwner`]), or the device has no such page.
    pub fn registers(&mut self) -> Result<&DeviceMemory> {
        if !self.liveness.is_live() {
            self.mapped = None;
            return Err(Error::FreedByOwner { what: "the imported VAR" });
        }
        if self.mapped.is_none() {
            self.mapped = Some(VarMapping::from_raw(self.raw).map(&self.mlx5)?);
        }
        self.mapped.as_ref().ok_or(Error::FreedByOwner { what: "the imported VAR" })
    }
}

impl Drop for ImportedVar {
    fn drop(&mut self) {
        self.mapped = None;
        if let Ok(unimport) = self.mlx5.library().and_then(|library| Ok(library.mlx5dv_var_unimport()?)) {
            // SAFETY: the VAR was imported once and is unimported once. The kernel object stays with its owner.
            unsafe { unimport(self.raw.as_ptr()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_var_exports_are_rejected() {
        let mapping = VarMapping { page_id: 7, bytes: 4096, offset: 0x9_0000 };
        let head = ExportHeader { release: 65, attributes: 24, mapping, liveness: *b"0123456789abcdef" };
        let whole = [head.to_bytes().as_slice(), &[0x5a; 24]].concat();
        assert_eq!(ExportHeader::split(&whole).unwrap(), (head, [0x5a; 24].as_slice()));
        for cut in 0..whole.len() {
            assert!(ExportHeader::split(&whole[..cut]).is_err(), "{cut} bytes");
        }
        let refused = |at: usize, value: u8, why: &str| {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let error = ExportHeader::split(&bytes).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        refused(0, 0, "its magic number is wrong");
        refused(7, 2, "its version is 2, and this program reads 1");
        refused(12, 23, "24 bytes of attributes follow, but the header says 23");
        refused(21, 1, "256 bytes at offset");
        refused(22, 0x80, "bytes at offset");
        refused(24, 1, "at offset 0x90001");
        refused(31, 0x80, "at offset");
    }
}
