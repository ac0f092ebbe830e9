#pragma once

#include <cstddef>

#include "transport/secure/openssl.h"

namespace pycomm {

// What OpenSSL calls while a TlsLink calls it; they are defined beside TlsLink.
int useTlsSession(Ssl* ssl, const EvpMd* digest, const unsigned char** identity, size_t* nbytes, SslSession** session);
int findTlsSession(Ssl* ssl, const unsigned char* identity, size_t nbytes, SslSession** session);
int writeTlsBio(Bio* bio, const char* bytes, int nbytes);
int readTlsBio(Bio* bio, char* into, int nbytes);
long controlTlsBio(Bio* bio, int command, long number, void* pointer);

} // namespace pycomm
