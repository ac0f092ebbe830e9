#pragma once

#include <cstddef>

#include "transport/secure/openssl.h"

namespace pycomm {

// OpenSSL calls these while a TlsLink calls OpenSSL. The first two belong to TlsLink, which they find in ex data 0; the others pass bytes
// to and from its TlsBio, which they find in the data of the BIO.
int useTlsSession(Ssl* ssl, const EvpMd* digest, const unsigned char** identity, size_t* nbytes, SslSession** session);
int findTlsSession(Ssl* ssl, const unsigned char* identity, size_t nbytes, SslSession** session);
int writeTlsBio(Bio* bio, const char* bytes, int nbytes);
int readTlsBio(Bio* bio, char* into, int nbytes);
long controlTlsBio(Bio* bio, int command, long number, void* pointer);

} // namespace pycomm
