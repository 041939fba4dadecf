//! Attributes of a command in the ioctl form.

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::ioctl::{self as abi, Attribute, Header};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::host::Host;

/// Maximum number of attributes of a command.
const MOST: u16 = 64;
/// Maximum length of an input in bytes.
const LONGEST: usize = 64 << 10;

/// The attributes of one command, and their address in the application's memory.
pub struct Attributes<'h, H> {
    host: &'h H,
    address: u64,
    header: Header,
    list: Vec<Attribute>,
}

impl<H> std::fmt::Debug for Attributes<'_, H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attributes").field("header", &self.header).field("list", &self.list).finish_non_exhaustive()
    }
}

impl<'h, H: Host> Attributes<'h, H> {
    /// Copies the header and the attributes of a command.
    ///
    /// # Errors
    /// `EFAULT` if the memory is not mapped; `EINVAL` for a wrong length or a repeated attribute.
    pub fn read(host: &'h H, address: u64) -> Result<Self, Errno> {
        let mut bytes = [0; size_of::<Header>()];
        host.read(address, &mut bytes)?;
        let header = Header::read_from_bytes(&bytes).map_err(|_| Errno::INVAL)?;
        let size = usize::from(header.num_attrs) * size_of::<Attribute>();
        if header.num_attrs > MOST
            || usize::from(header.length) != size + bytes.len()
            || header.reserved1 != 0
            || header.reserved2 != 0
        {
            return Err(Errno::INVAL);
        }
        let mut bytes = vec![0; size];
        host.read(address + size_of::<Header>() as u64, &mut bytes)?;
        let list: Vec<Attribute> = bytes
            .chunks_exact(size_of::<Attribute>())
            .filter_map(|bytes| Attribute::read_from_bytes(bytes).ok())
            .collect();
        for (i, attribute) in list.iter().enumerate() {
            if list[..i].iter().any(|other| other.attr_id == attribute.attr_id) {
                return Err(Errno::INVAL);
            }
        }
        Ok(Self { host, address, header, list })
    }

    /// Returns object and method.
    pub fn method(&self) -> (u16, u16) {
        (self.header.object_id, self.header.method_id)
    }

    /// Returns the driver that the library assumes.
    pub fn driver(&self) -> u32 {
        self.header.driver_id
    }

    /// Checks that all mandatory attributes are known.
    ///
    /// # Errors
    /// `EPROTONOSUPPORT` if one is not.
    pub fn check_known(&self, known: &[u16]) -> Result<(), Errno> {
        let foreign = |a: &Attribute| a.flags & abi::MANDATORY != 0 && !known.contains(&a.attr_id);
        if self.list.iter().any(foreign) { Err(Errno::PROTONOSUPPORT) } else { Ok(()) }
    }

    fn get(&self, id: u16) -> Option<&Attribute> {
        self.list.iter().find(|attribute| attribute.attr_id == id)
    }

    /// Returns true if the attribute exists.
    pub fn has(&self, id: u16) -> bool {
        self.get(id).is_some()
    }

    /// Returns the bytes of an input. Inputs of up to 8 bytes are inline.
    ///
    /// # Errors
    /// `EFAULT` if the memory is not mapped; `EINVAL` if the attribute is missing or too long.
    pub fn bytes(&self, id: u16) -> Result<Vec<u8>, Errno> {
        let attribute = self.get(id).ok_or(Errno::INVAL)?;
        let length = usize::from(attribute.len);
        if length <= 8 {
            return Ok(attribute.data.as_bytes()[..length].to_vec());
        }
        if length > LONGEST {
            return Err(Errno::INVAL);
        }
        let mut bytes = vec![0; length];
        self.host.read(attribute.data, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns an input of a given type.
    ///
    /// # Errors
    /// The errors of [`Self::bytes`]; `EINVAL` if the input is too short.
    pub fn value<T: FromBytes + KnownLayout + Immutable>(&self, id: u16) -> Result<T, Errno> {
        T::read_from_prefix(&self.bytes(id)?).map(|(value, _)| value).map_err(|_| Errno::INVAL)
    }

    /// Returns a constant or flags of up to 8 bytes; `None` if the attribute is missing.
    ///
    /// # Errors
    /// `EINVAL` if the attribute is longer than 8 bytes.
    pub fn number(&self, id: u16) -> Result<Option<u64>, Errno> {
        let Some(attribute) = self.get(id) else { return Ok(None) };
        match attribute.len {
            8 => Ok(Some(attribute.data)),
            1..8 => Ok(Some(attribute.data & (u64::MAX >> (64 - 8 * u32::from(attribute.len))))),
            _ => Err(Errno::INVAL),
        }
    }

    /// Returns the value of an enumeration, and its payload of at most two bytes.
    pub fn choice(&self, id: u16) -> Option<(u8, u16)> {
        self.get(id).filter(|attribute| attribute.len <= 2).map(|attribute| (attribute.elem_id, attribute.data as u16))
    }

    /// Returns a list of handles; it is empty if the attribute is missing.
    ///
    /// # Errors
    /// The errors of [`Self::bytes`]; `EINVAL` if the length is no multiple of 4.
    pub fn handles(&self, id: u16) -> Result<Vec<u32>, Errno> {
        if !self.has(id) {
            return Ok(Vec::new());
        }
        let bytes = self.bytes(id)?;
        let (words, rest) = bytes.as_chunks::<4>();
        if rest.is_empty() {
            Ok(words.iter().map(|word| u32::from_ne_bytes(*word)).collect())
        } else {
            Err(Errno::INVAL)
        }
    }

    /// Returns a handle or a file descriptor.
    pub fn handle(&self, id: u16) -> Option<u32> {
        self.get(id).filter(|attribute| attribute.len == 0).map(|attribute| attribute.data as u32)
    }

    /// Returns the capacity of an output in bytes; 0 if it is missing.
    pub fn room(&self, id: u16) -> usize {
        self.get(id).map_or(0, |attribute| usize::from(attribute.len))
    }

    /// Writes an output, truncated or padded with zeros to its capacity. Does nothing if the attribute is
    /// missing.
    ///
    /// # Errors
    /// `EFAULT` if the memory is not mapped.
    pub fn put(&mut self, id: u16, bytes: &[u8]) -> Result<(), Errno> {
        let Some(attribute) = self.list.iter_mut().find(|attribute| attribute.attr_id == id) else { return Ok(()) };
        let room = usize::from(attribute.len);
        let mut padded = bytes[..bytes.len().min(room)].to_vec();
        padded.resize(room, 0);
        self.host.write(attribute.data, &padded)?;
        attribute.flags |= abi::VALID_OUTPUT;
        Ok(())
    }

    /// Sets the handle of a new object, or a new descriptor.
    pub fn put_handle(&mut self, id: u16, handle: u64) {
        if let Some(attribute) = self.list.iter_mut().find(|attribute| attribute.attr_id == id) {
            attribute.data = handle;
        }
    }

    /// Writes handles and output flags to the application's memory.
    ///
    /// # Errors
    /// `EFAULT` if the memory is not mapped.
    pub fn write_back(&self) -> Result<(), Errno> {
        let bytes: Vec<u8> = self.list.iter().flat_map(|attribute| attribute.as_bytes().to_vec()).collect();
        self.host.write(self.address + size_of::<Header>() as u64, &bytes)
    }
}
