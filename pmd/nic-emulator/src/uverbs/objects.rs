//! Handles of a context, and who uses whom.

use rustix::io::Errno;

use crate::device::ObjectId;

/// Most objects of a context.
const MOST: usize = 1 << 20;

/// Kinds of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Pd,
    Mr,
    Cq,
    Qp,
    Wq,
    Table,
    Flow,
    Matcher,
    FlowAction,
    Counters,
    FirmwareObject,
}

/// An object of the application.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub(crate) kind: Kind,
    /// The device's number.
    pub(crate) id: ObjectId,
    /// Comes back in events.
    pub(crate) user_handle: u64,
    /// Completion channel, by its descriptor.
    pub(crate) channel: Option<i32>,
    /// Events sent so far: completions, and others.
    pub(crate) sent: (u32, u32),
    /// Objects that this one needs.
    needs: Vec<u32>,
    /// How many objects need this one.
    users: u32,
}

/// All objects of a context by handle. Handles are the smallest free numbers, as the kernel's are.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    slots: Vec<Option<Object>>,
    /// No slot before this one is free.
    full_to: usize,
}

impl Objects {
    /// Adds an object that needs others: its handle.
    pub(crate) fn add(
        &mut self,
        kind: Kind,
        id: ObjectId,
        user_handle: u64,
        channel: Option<i32>,
        needs: Vec<u32>,
    ) -> u32 {
        let handle = self.next();
        for &need in &needs {
            if let Some(object) = self.slots[need as usize].as_mut() {
                object.users += 1;
            }
        }
        let object = Some(Object { kind, id, user_handle, channel, sent: (0, 0), needs, users: 0 });
        if handle as usize == self.slots.len() {
            self.slots.push(object);
        } else {
            self.slots[handle as usize] = object;
        }
        self.full_to = handle as usize + 1;
        handle
    }

    /// The handle that the next object gets.
    pub(crate) fn next(&self) -> u32 {
        let free = self.slots[self.full_to..].iter().position(Option::is_none);
        free.map_or(self.slots.len(), |at| self.full_to + at) as u32
    }

    /// `ENOMEM` if there are too many already.
    pub(crate) fn room(&self) -> Result<(), Errno> {
        if self.slots.len() < MOST { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// The object behind a handle: `ENOENT` if there is none, `EINVAL` if it is another kind.
    pub(crate) fn get(&self, handle: u32, kind: Kind) -> Result<&Object, Errno> {
        let object = self.slots.get(handle as usize).and_then(Option::as_ref).ok_or(Errno::NOENT)?;
        if object.kind == kind { Ok(object) } else { Err(Errno::INVAL) }
    }

    /// The device's number of an object.
    pub(crate) fn id(&self, handle: u32, kind: Kind) -> Result<ObjectId, Errno> {
        self.get(handle, kind).map(|object| object.id)
    }

    pub(crate) fn get_mut(&mut self, handle: u32) -> Option<&mut Object> {
        self.slots.get_mut(handle as usize)?.as_mut()
    }

    /// Takes an object out: `EBUSY` while others need it.
    pub(crate) fn remove(&mut self, handle: u32, kind: Kind) -> Result<Object, Errno> {
        if self.get(handle, kind)?.users > 0 {
            return Err(Errno::BUSY);
        }
        let object = self.slots[handle as usize].take().ok_or(Errno::NOENT)?;
        self.full_to = self.full_to.min(handle as usize);
        for &need in &object.needs {
            if let Some(other) = self.slots[need as usize].as_mut() {
                other.users -= 1;
            }
        }
        Ok(object)
    }

    /// Whether anything uses an object.
    pub(crate) fn is_used(&self, handle: u32) -> bool {
        self.slots.get(handle as usize).and_then(Option::as_ref).is_some_and(|object| object.users > 0)
    }

    /// Whether any object reports to this channel.
    pub(crate) fn uses_channel(&self, channel: i32) -> bool {
        self.slots.iter().flatten().any(|object| object.channel == Some(channel))
    }

    /// Takes everything out, users before what they use.
    pub(crate) fn drain(&mut self) -> Vec<Object> {
        let mut all = Vec::new();
        while self.slots.iter().any(Option::is_some) {
            for handle in 0..self.slots.len() as u32 {
                if let Some((kind, 0)) = self.slots[handle as usize].as_ref().map(|object| (object.kind, object.users))
                {
                    all.extend(self.remove(handle, kind));
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_stays() {
        let mut objects = Objects::default();
        let pd = objects.add(Kind::Pd, 7, 0, None, vec![]);
        let mr = objects.add(Kind::Mr, 1, 0, None, vec![pd]);
        assert_eq!(objects.remove(pd, Kind::Pd).unwrap_err(), Errno::BUSY);
        assert_eq!(objects.remove(pd, Kind::Mr).unwrap_err(), Errno::INVAL);
        assert_eq!(objects.remove(99, Kind::Pd).unwrap_err(), Errno::NOENT);
        objects.remove(mr, Kind::Mr).unwrap();
        assert_eq!(objects.remove(pd, Kind::Pd).unwrap().id, 7);
        assert_eq!(objects.add(Kind::Pd, 1, 0, None, vec![]), 0, "the smallest free number");
    }

    #[test]
    fn everything_goes_users_first() {
        let mut objects = Objects::default();
        let pd = objects.add(Kind::Pd, 0, 0, None, vec![]);
        let cq = objects.add(Kind::Cq, 0, 0, None, vec![]);
        let wq = objects.add(Kind::Wq, 0, 0, None, vec![pd, cq]);
        let table = objects.add(Kind::Table, 0, 0, None, vec![wq, wq]);
        objects.add(Kind::Qp, 0, 0, None, vec![pd, table]);
        let kinds: Vec<Kind> = objects.drain().iter().map(|object| object.kind).collect();
        let at = |kind| kinds.iter().position(|k| *k == kind).unwrap();
        assert!(at(Kind::Qp) < at(Kind::Table) && at(Kind::Table) < at(Kind::Wq) && at(Kind::Wq) < at(Kind::Cq));
    }
}
