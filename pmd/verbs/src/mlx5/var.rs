// UNSAFETY: calls libmlx5.
#![allow(unsafe_code)]

//! VAR: pages of virtio doorbells (mlx5dv_alloc_var(3)), and how another process gets at them.
//!
//! The manual's rules hold by type. A [`Var`] owns the kernel's object and frees it. An [`ImportedVar`] is what another process makes of
//! [`Var::export`] on an imported device ([`crate::Verbs::import_device`]): it can be mapped, and only be unimported. Once the owner has
//! freed it, an importer's next [`ImportedVar::registers`] is an error: the library would not notice, so a [`Lease`] goes along.
//!
//! `mlx5dv_var_export`, `_import` and `_unimport` are in rdma-core since release 63; allocation since 28.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rdma_core_sys::MissingSymbol;
use rdma_core_sys::mlx5dv::*;
use wirepath_memory::DeviceMemory;

use super::{Mlx5, PAGE_BYTES};
use crate::{Error, Lease, LeaseView, Result, registers};

const WHAT: &str = "the exported VAR";
/// What exported bytes begin with: a name, and the version of what follows.
const MAGIC: [u8; 8] = *b"WPVAR\0\0\x01";
/// Bytes before the library's own.
const HEAD: usize = 48;
/// Most bytes that a library's own attributes may have.
const MOST_ATTRIBUTES: usize = 256;
/// Largest page of registers that is mapped.
const MOST_BYTES: u32 = 1 << 20;

/// What a VAR is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VarKind {
    /// Doorbells of virtio queues.
    #[default]
    Virtio,
    /// Doorbells that are transaction-layer packets (`MLX5DV_VAR_ALLOC_FLAG_TLP`, rdma-core 65).
    Tlp,
}

/// A page of virtio doorbells of this process.
#[derive(Debug)]
pub struct Var {
    raw: NonNull<mlx5dv_var>,
    mlx5: Mlx5,
    lease: Lease,
}

// SAFETY: libmlx5 changes nothing in it after its creation.
unsafe impl Send for Var {}
// SAFETY: as above.
unsafe impl Sync for Var {}

/// What the struct of the library says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    page_id: u32,
    bytes: u32,
    offset: libc::off_t,
}

impl Place {
    fn of(raw: NonNull<mlx5dv_var>) -> Self {
        // SAFETY: a living VAR; never changed.
        let var = unsafe { raw.as_ref() };
        Self { page_id: var.page_id, bytes: var.length, offset: var.mmap_off }
    }

    /// What is wrong with it, if it cannot be mapped.
    fn problem(self) -> Option<String> {
        let page = PAGE_BYTES as u32;
        let right = self.bytes.is_multiple_of(page)
            && (page..=MOST_BYTES).contains(&self.bytes)
            && self.offset >= 0
            && self.offset % PAGE_BYTES as libc::off_t == 0;
        (!right).then(|| format!("{} bytes at offset {:#x} of the device", self.bytes, self.offset))
    }

    fn map(self, mlx5: &Mlx5) -> Result<DeviceMemory> {
        if let Some(problem) = self.problem() {
            return Err(mlx5.inner().nonsense("mlx5dv_alloc_var", problem));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        registers::map(mlx5.context.descriptor(), self.offset, self.bytes as usize, protection)
    }
}

/// A VAR on its way to another process: bytes, and a file that goes with them (`SCM_RIGHTS`).
#[derive(Debug)]
pub struct ExportedVar<'v> {
    /// For [`ImportedVar::new`] in a process with the same release of libmlx5.
    pub bytes: Vec<u8>,
    /// The lease's file.
    pub lease: BorrowedFd<'v>,
}

impl Mlx5 {
    /// Whether the loaded libmlx5 can hand a VAR to another process, and take one.
    ///
    /// # Errors
    /// The function that it lacks, its release and the one that is needed.
    pub fn exports_vars(&self) -> Result<()> {
        let library = self.library()?;
        let missing: [std::result::Result<(), MissingSymbol>; 4] = [
            library._mlx5dv_get_export_sizes().map(drop),
            library.mlx5dv_var_export().map(drop),
            library.mlx5dv_var_import().map(drop),
            library.mlx5dv_var_unimport().map(drop),
        ];
        missing.into_iter().collect::<std::result::Result<(), _>>().map_err(Error::from)
    }

    /// Bytes of the attributes that this release exports.
    fn attribute_bytes(&self) -> Result<usize> {
        let sizes_of = self.library()?._mlx5dv_get_export_sizes()?;
        let mut sizes = mlx5dv_export_sizes::zeroed();
        // SAFETY: room for the struct, and its size.
        unsafe { sizes_of(&raw mut sizes, size_of::<mlx5dv_export_sizes>()) };
        match sizes.var_attrs_size as usize {
            bytes @ 1..=MOST_ATTRIBUTES => Ok(bytes),
            bytes => Err(self.inner().nonsense("mlx5dv_get_export_sizes", format!("{bytes} bytes for a VAR"))),
        }
    }

    /// Release of the loaded library, 0 if it does not tell.
    fn release(&self) -> Result<u32> {
        Ok(self.library()?.library().version.map_or(0, |version| version.major))
    }
}

impl Var {
    /// A new page.
    ///
    /// # Errors
    /// The device has none (`EOPNOTSUPP`), or no more (`ENOSPC`).
    pub fn new(mlx5: &Mlx5, kind: VarKind) -> Result<Self> {
        let library = mlx5.library()?;
        let alloc = library.mlx5dv_alloc_var()?;
        library.mlx5dv_free_var()?;
        let lease = Lease::new()?;
        let flags = u32::from(kind == VarKind::Tlp);
        // SAFETY: an open context of libmlx5.
        let raw = unsafe { alloc(mlx5.inner().raw.as_ptr(), flags) };
        let raw = mlx5.inner().created("mlx5dv_alloc_var", raw, None)?;
        Ok(Self { raw, mlx5: mlx5.clone(), lease })
    }

    /// Number of the page in firmware commands.
    pub fn page_id(&self) -> u32 {
        Place::of(self.raw).page_id
    }

    /// Maps the page.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn registers(&self) -> Result<DeviceMemory> {
        Place::of(self.raw).map(&self.mlx5)
    }

    /// What another process needs, beside the device's file, to map the page as well. This process keeps the object.
    ///
    /// # Errors
    /// libmlx5 is older than release 63, or refused.
    pub fn export(&self) -> Result<ExportedVar<'_>> {
        let export = self.mlx5.library()?.mlx5dv_var_export()?;
        let place = Place::of(self.raw);
        let mut attributes = vec![0u64; self.mlx5.attribute_bytes()?.div_ceil(8)];
        // SAFETY: a living VAR, and room for what the library says that it writes.
        let result = unsafe { export(self.raw.as_ptr(), attributes.as_mut_ptr().cast()) };
        self.mlx5.inner().done("mlx5dv_var_export", result)?;
        let attributes: Vec<u8> = attributes.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let attributes = &attributes[..self.mlx5.attribute_bytes()?];
        let head = Head {
            release: self.mlx5.release()?,
            attributes: attributes.len() as u32,
            place,
            lease: self.lease.name(),
        };
        Ok(ExportedVar { bytes: [head.to_bytes().as_slice(), attributes].concat(), lease: self.lease.file() })
    }
}

impl Drop for Var {
    fn drop(&mut self) {
        // First: whoever looks after this does not use it any more.
        self.lease.end();
        if let Ok(free) = self.mlx5.library().and_then(|library| Ok(library.mlx5dv_free_var()?)) {
            // SAFETY: allocated once, freed once.
            unsafe { free(self.raw.as_ptr()) };
        }
    }
}

/// What precedes the library's bytes, which have neither magic number nor version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    /// rdma-core release whose bytes follow.
    release: u32,
    /// How many of them.
    attributes: u32,
    place: Place,
    lease: [u8; 16],
}

impl Head {
    fn to_bytes(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.release.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.attributes.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.place.page_id.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.place.bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.place.offset.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.lease);
        bytes
    }

    /// Head and attributes.
    fn split(bytes: &[u8]) -> Result<(Self, &[u8])> {
        let foreign = |problem: &str| Error::Foreign { what: WHAT, problem: problem.to_owned() };
        let Some((head, attributes)) = bytes.split_first_chunk::<HEAD>() else {
            return Err(foreign("it is too short"));
        };
        if head[..5] != MAGIC[..5] {
            return Err(foreign("these bytes are none"));
        }
        if head[..8] != MAGIC {
            return Err(foreign(&format!("its version is {}, and this program reads {}", head[7], MAGIC[7])));
        }
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap_or_default());
        let offset = libc::off_t::from_le_bytes(head[24..32].try_into().unwrap_or_default());
        let place = Place { page_id: word(16), bytes: word(20), offset };
        let lease = head[32..].try_into().unwrap_or_default();
        let head = Self { release: word(8), attributes: word(12), place, lease };
        if head.attributes as usize != attributes.len() || attributes.len() > MOST_ATTRIBUTES {
            return Err(foreign(&format!("{} bytes follow, {} were announced", attributes.len(), head.attributes)));
        }
        if let Some(problem) = place.problem() {
            return Err(foreign(&problem));
        }
        Ok((head, attributes))
    }
}

/// A page of virtio doorbells that another process owns.
#[derive(Debug)]
pub struct ImportedVar {
    raw: NonNull<mlx5dv_var>,
    mlx5: Mlx5,
    lease: LeaseView,
    mapped: Option<DeviceMemory>,
}

// SAFETY: as for `Var`.
unsafe impl Send for ImportedVar {}
// SAFETY: as above.
unsafe impl Sync for ImportedVar {}

impl ImportedVar {
    /// Takes what [`Var::export`] gave in another process, on the device that it passed. Nothing is mapped yet.
    ///
    /// # Errors
    /// libmlx5 is older than release 63, or of another release than the owner's; the bytes are no exported VAR, or not that of the
    /// lease; the owner has freed it.
    pub fn new(mlx5: &Mlx5, bytes: &[u8], lease: &OwnedFd) -> Result<Self> {
        mlx5.exports_vars()?;
        let import = mlx5.library()?.mlx5dv_var_import()?;
        let (head, attributes) = Head::split(bytes)?;
        let foreign = |problem: String| Error::Foreign { what: WHAT, problem };
        let release = mlx5.release()?;
        if head.release != release {
            let problem = format!("it is libmlx5 {}'s, and this process has libmlx5 {release}", head.release);
            return Err(foreign(problem));
        }
        let expected = mlx5.attribute_bytes()?;
        if attributes.len() != expected {
            return Err(foreign(format!("{} bytes of attributes; libmlx5 reads {expected}", attributes.len())));
        }
        let lease = LeaseView::attach(lease, head.lease)?;
        if !lease.is_live() {
            return Err(Error::Ended { what: WHAT });
        }
        // The library reads a struct.
        let mut aligned = vec![0u64; expected.div_ceil(8)];
        for (word, bytes) in aligned.iter_mut().zip(attributes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        // SAFETY: an open context of libmlx5; as many bytes as the library reads, which copies them and asks nobody.
        let raw = unsafe { import(mlx5.inner().raw.as_ptr(), aligned.as_mut_ptr().cast()) };
        let raw = mlx5.inner().created("mlx5dv_var_import", raw, None)?;
        let var = Self { raw, mlx5: mlx5.clone(), lease, mapped: None };
        if Place::of(raw) != head.place {
            return Err(foreign("the library's bytes are of another page".to_owned()));
        }
        Ok(var)
    }

    /// Number of the page in firmware commands.
    pub fn page_id(&self) -> u32 {
        Place::of(self.raw).page_id
    }

    /// The page, mapped at the first call.
    ///
    /// # Errors
    /// [`Error::Ended`]: the owner has freed it. The kernel knows no such page of this device.
    pub fn registers(&mut self) -> Result<&DeviceMemory> {
        if !self.lease.is_live() {
            self.mapped = None;
            return Err(Error::Ended { what: "the imported VAR" });
        }
        if self.mapped.is_none() {
            self.mapped = Some(Place::of(self.raw).map(&self.mlx5)?);
        }
        self.mapped.as_ref().ok_or(Error::Ended { what: "the imported VAR" })
    }
}

impl Drop for ImportedVar {
    fn drop(&mut self) {
        self.mapped = None;
        if let Ok(unimport) = self.mlx5.library().and_then(|library| Ok(library.mlx5dv_var_unimport()?)) {
            // SAFETY: imported once. The kernel's object stays with its owner.
            unsafe { unimport(self.raw.as_ptr()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_exported_var_are_refused_one_by_one() {
        let place = Place { page_id: 7, bytes: 4096, offset: 0x9_0000 };
        let head = Head { release: 65, attributes: 24, place, lease: *b"0123456789abcdef" };
        let whole = [head.to_bytes().as_slice(), &[0x5a; 24]].concat();
        assert_eq!(Head::split(&whole).unwrap(), (head, [0x5a; 24].as_slice()));
        for cut in 0..whole.len() {
            assert!(Head::split(&whole[..cut]).is_err(), "{cut} bytes");
        }
        let refused = |at: usize, value: u8, why: &str| {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let error = Head::split(&bytes).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        refused(0, 0, "these bytes are none");
        refused(7, 2, "its version is 2, and this program reads 1");
        refused(12, 23, "24 bytes follow, 23 were announced");
        refused(21, 1, "256 bytes at offset");
        refused(22, 0x80, "bytes at offset");
        refused(24, 1, "at offset 0x90001");
        refused(31, 0x80, "at offset");
    }
}
